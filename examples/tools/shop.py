"""A shop's stock list, and the two tools that read it. No model can know these numbers by heart."""

from __future__ import annotations

import json
import random

ITEMS = (
    *("apron", "basket", "blanket", "bottle", "bowl", "broom", "brush", "bucket", "candle", "carpet"),
    *("chair", "clock", "comb", "cup", "curtain", "drum", "fork", "hammer", "helmet", "jacket"),
    *("kettle", "knife", "ladder", "lamp", "mirror", "mug", "needle", "oven", "pan", "pen"),
    *("pillow", "plate", "rope", "saw", "scarf", "shelf", "spoon", "stool", "towel", "vase"),
)
_DRAWN = random.Random(5)  # noqa: S311 - prices, not secrets
PRICES = {item: _DRAWN.randrange(3, 60) for item in ITEMS}
STOCK = {item: _DRAWN.randrange(2, 40) for item in ITEMS}
LISTS = {"price": PRICES, "stock": STOCK}


def _tool(name: str, description: str) -> dict[str, object]:
    item = {"type": "string", "description": "The item, one word."}
    parameters = {"type": "object", "properties": {"item": item}, "required": ["item"]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [
    _tool("price", "Return the price of an item in euros."),
    _tool("stock", "Return how many of an item are in stock."),
]


def use(name: str, arguments: str) -> str:
    """Return what a tool says, also to a call that is wrong: the model may try again."""
    if name not in LISTS:
        return f"There is no tool {name}."
    try:
        item = json.loads(arguments)["item"]
    except (ValueError, KeyError, TypeError):
        return 'The arguments must be {"item": "…"}.'
    found = LISTS[name].get(str(item).strip().lower())
    return f"There is no {item}." if found is None else str(found)
