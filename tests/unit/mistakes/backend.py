"""Mistakes in the connection to the backend."""

from __future__ import annotations

from tests.unit.mistakes.desk import Desk, Mistake, Provoke, Said, config


def address(door: str, *arguments: str) -> Provoke:
    """The model's address at one of the ports."""

    def provoke(desk: Desk) -> Said:
        url = f"http://127.0.0.1:{getattr(desk.doors, door)}/v1"
        return config(*arguments, model={"base_url": url})(desk)

    return provoke


def port_of_the_gateway(desk: Desk) -> Said:
    return config(backend={"port": desk.doors.gateway_port})(desk)


MISTAKES = [
    Mistake(
        "no backend runs",
        config(backend={"port": 9}),
        "no insitu backend answers",
        "http://127.0.0.1:9",
        "insitu serve --model DIRECTORY_OR_HUB_ID --model-name tiny",
    ),
    Mistake(
        "the port is the gateway's",
        port_of_the_gateway,
        "is the gateway of a backend, not its API",
        "http://127.0.0.1:",
        "backend.port",
    ),
    Mistake(
        "the model's address is the API's",
        address("api_port"),
        "is the API of a backend, not its gateway",
        "http://127.0.0.1:",
        "set model.base_url to http://127.0.0.1:",
    ),
    Mistake(
        "no gateway at the model's address",
        address("no_port"),
        "no gateway answers at http://127.0.0.1:9",
        "model.base_url",
        "set it to http://127.0.0.1:",
    ),
    Mistake(
        "nothing answers a trial",
        address("no_port", "try", "config.yml"),
        "no gateway answers at http://127.0.0.1:9",
        "model.base_url",
        "set it to http://127.0.0.1:",
    ),
    Mistake(
        "the backend's key is wrong",
        config(backend={"api_key": "wrong"}),
        "key",
        "127.0.0.1:",
        "backend.api_key",
    ),
    Mistake(
        "the model's key is wrong",
        config(model={"api_key": "wrong"}),
        "rejects the key",
        "model.api_key",
        "INSITU_API_KEY",
    ),
    Mistake(
        "HTTPS to a server without it",
        config(backend={"tls": True}),
        "does not speak TLS",
        "https://127.0.0.1:",
        "write http://",
    ),
    Mistake(
        "another model is served",
        config("try", "config.yml", model={"model_name": "other"}),
        "serves neither the run 'first' nor 'other'; it serves tiny",
        "http://127.0.0.1:",
        "insitu serve --model DIRECTORY_OR_HUB_ID --model-name other",
    ),
    Mistake(
        "the address has no scheme",
        config(model={"base_url": "127.0.0.1:8000/v1"}),
        "is not the address of a gateway",
        "127.0.0.1:8000/v1",
        "http://host:port/v1",
    ),
    Mistake(
        "the start is a run that is not there",
        config(backend={"init_from": "older@3"}),
        "has no run 'older' to start from",
        "older@3",
        "insitu runs list",
    ),
]
