"""The `insitu` command. Each command's module is imported when the command is used."""

from __future__ import annotations

import importlib
import keyword
import sys

import click

_COMMANDS = {
    "demo": ("insitu.cli.demo", "Teach a small model to add, all on this machine."),
    "init": ("insitu.cli.project.init", "Start a project: agent, reward, data and configuration."),
    "try": ("insitu.cli.project.try_out", "Run your agent on a few examples and score its answers."),
    "finetune": ("insitu.cli.finetune", "Train your agent's model, configured by one YAML file."),
    "eval": ("insitu.cli.eval", "Compare two models on held-out examples."),
    "schema": ("insitu.cli.project.schema", "Print the JSON schema of a configuration, for editors."),
    "migrate": ("insitu.cli.migrate", "Convert a configuration of the NeMo Agent Toolkit."),
    "serve": ("insitu.cli.serve", "Serve a model, record its calls, and train it."),
    "replicas": ("insitu.cli.replicas", "Change the number of a running backend's engines."),
    "runs": ("insitu.cli.runs", "List, show, fork, close and delete the runs of a backend."),
    "promote": ("insitu.cli.promotion", "Choose the step that calls to a run's name get."),
    "rollback": ("insitu.cli.promotion", "Give them the step that they got before."),
    "export": ("insitu.cli.export", "Write the weights of a run into a directory, with a model card."),
    "keys": ("insitu.cli.keys", "Create, list and revoke keys of a backend."),
    "backup": ("insitu.cli.backup", "Copy a backend's state, also while it runs."),
    "restore": ("insitu.cli.backup", "Restore a backend's state from a backup."),
    "plan": ("insitu.cli.plan", "Show what a model takes on your GPUs."),
    "doctor": ("insitu.cli.doctor", "Check that this machine computes what insitu expects of it."),
    "view": ("insitu.cli.project.view", "Look at runs in a browser: curves, rollouts, every token."),
    "report": ("insitu.cli.project.report", "Write a run as one HTML file."),
    "trajectories": ("insitu.cli.trajectories", "Inspect the rollouts of a run."),
    "gateway": ("insitu.cli.gateway", "Record the calls to any vLLM server."),
}


class _LazyGroup(click.Group):
    """Knows each command's name and one-line help, so that help imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        return getattr(module, f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            from insitu.plugins import nearest

            raise click.UsageError(f"No such command {args[0]!r}{nearest(args[0], _COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="insitu")
@click.option("--debug", is_flag=True, help="Show the traceback when a command fails.")
def cli(debug: bool) -> None:
    """Reinforcement learning for LLM agents, in place."""


def main() -> None:
    """Run the command: print errors meant for people without a traceback, and exit with 130 on any Ctrl-C."""
    from insitu.errors import InsituError

    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        if isinstance(error, click.UsageError) and error.ctx is None:  # of the parser, which knows no command
            words = [word for word in sys.argv[1:2] if word in _COMMANDS]
            click.echo(f"Try '{' '.join(['insitu', *words])} --help' for help.", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except InsituError as error:
        if "--debug" in sys.argv:
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
