"""Safe tools that a model may call: a calculator without eval, the register of the built-in world, a calendar.

Every tool takes plain JSON values and gives back one short line of text.
"""

import ast
import datetime
import functools
import json
import math
from collections.abc import Callable

from dataset.builtin.world import World, build_world

MAX_EXPRESSION_CHARACTERS = 200
MAX_EXPRESSION_DEPTH = 50
MAX_DIGITS = 1000
LARGEST = 10**MAX_DIGITS  # bound of any intermediate integer: keeps a hostile 9**9**9 from taking time or memory

LOOKUP_FIELDS = ("age", "phone", "house", "home", "job", "pet", "sibling", "friend")
DAY_NAMES = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

TOOL_SCHEMAS: dict[str, dict] = {
    "calculate": {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Work out an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    },
    "lookup": {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look up a person in the register.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "field": {"type": "string"}},
                "required": ["name", "field"],
            },
        },
    },
    "calendar": {
        "type": "function",
        "function": {
            "name": "calendar",
            "description": "Day of the week of a date, or days between two dates.",
            "parameters": {
                "type": "object",
                "properties": {"date": {"type": "string"}, "until": {"type": "string"}},
                "required": ["date"],
            },
        },
    },
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression as text.

    Knows + - * / // % **, parentheses, unary + and -, integers and decimal numbers. Never evaluates code: the
    syntax tree is walked, and any other node is refused. Numbers stay below 10**1000, so time and memory are bounded.

    Raises:
        ValueError: what is wrong with the expression (not text, too long, bad syntax, a name or call, division
            by zero, a number too large).
    """
    if not isinstance(expression, str):
        raise ValueError(f"expression must be text, got {type(expression).__name__}")
    if not expression.strip():
        raise ValueError("expression is empty")
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        raise ValueError(
            f"expression has {len(expression)} characters, at most {MAX_EXPRESSION_CHARACTERS} are allowed"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"not an arithmetic expression: {expression!r}") from None
    return _format_number(_value(tree.body, 0))


def _value(node: ast.AST, depth: int) -> int | float:
    """The number that a syntax node stands for."""
    if depth > MAX_EXPRESSION_DEPTH:
        raise ValueError(f"expression is nested deeper than {MAX_EXPRESSION_DEPTH}")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, depth + 1)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, depth + 1), _value(node.right, depth + 1)
        return _bounded(_combine(node.op, left, right))
    raise ValueError(f"only numbers, + - * / // % ** and parentheses are allowed, found {type(node).__name__}")


def _combine(operator: ast.operator, left: int | float, right: int | float) -> int | float:
    """Apply one binary operator."""
    try:
        match operator:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
            case ast.FloorDiv():
                return left // right
            case ast.Mod():
                return left % right
            case ast.Pow():
                return _power(left, right)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    raise ValueError(f"only + - * / // % ** are allowed, found {type(operator).__name__}")


def _power(base: int | float, exponent: int | float) -> int | float:
    """`base ** exponent`, refused before it is worked out where it would be too large or not a real number."""
    if abs(exponent) > 4 * MAX_DIGITS or (abs(base) > 1 and exponent * math.log10(abs(base)) > MAX_DIGITS):
        raise ValueError("the result is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError("a root of a negative number is not a real number")
    return result


def _bounded(value: int | float) -> int | float:
    """The value itself, if it is finite and has at most MAX_DIGITS digits."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("the result is too large")
    elif abs(value) >= LARGEST:
        raise ValueError("the result is too large")
    return value


def _format_number(value: int | float) -> str:
    """Whole numbers without a decimal point, others with up to twelve significant digits."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.12g}"


def lookup(name: str, field: str, world: World | None = None) -> str:
    """One entry of the register of the built-in world.

    The answer is in the language of `name`. `world` defaults to the built-in world.

    Raises:
        ValueError: nobody has that name, or there is no such field.
    """
    if not isinstance(name, str) or not isinstance(field, str):
        raise ValueError("name and field must be text")
    if field not in LOOKUP_FIELDS:
        raise ValueError(f"no field {field!r}, only {', '.join(LOOKUP_FIELDS)}")
    world = world or _default_world()
    person = world.find(name)
    if person is None:
        raise ValueError(f"nobody called {name!r} is in the register")
    language = "zh" if name.strip() == person.name.zh else "en"
    match field:
        case "age" | "phone" | "house":
            return str(getattr(person, field))
        case "home":
            return person.home.name.to(language)
        case "sibling":
            return world.sibling(person).name.to(language)
        case "friend":
            return world.friend(person).name.to(language)
    return getattr(person, field).to(language)


@functools.cache
def _default_world() -> World:
    """The built-in world, built once (it never changes, so a cache is no state)."""
    return build_world()


def calendar(date: str, until: str | None = None) -> str:
    """The English day of the week of `date`, or with `until` the number of days from `date` to `until`.

    Dates are written YYYY-MM-DD.

    Raises:
        ValueError: a date is not of that form or does not exist.
    """
    start = _date(date)
    if until is None:
        return DAY_NAMES[start.weekday()]
    return str((_date(until) - start).days)


def _date(text: str) -> datetime.date:
    try:
        return datetime.datetime.strptime(text, "%Y-%m-%d").date()
    except (TypeError, ValueError):
        raise ValueError(f"not a date of the form YYYY-MM-DD: {text!r}") from None


_TOOLS: dict[str, Callable[..., str]] = {"calculate": calculate, "lookup": lookup, "calendar": calendar}


def run_tool(name: str, arguments: dict) -> str:
    """Run one tool call and give its result, or one line "error: ..." that says what was wrong with the call.

    `arguments` maps parameter names to values, exactly as in the tool's JSON schema.
    """
    if name not in TOOL_SCHEMAS:
        return f"error: no tool {name!r}, only {', '.join(TOOL_SCHEMAS)}"
    if not isinstance(arguments, dict):
        return f"error: arguments of {name} must be an object, got {type(arguments).__name__}"
    parameters = TOOL_SCHEMAS[name]["function"]["parameters"]
    unknown = [key for key in arguments if key not in parameters["properties"]]
    missing = [key for key in parameters["required"] if key not in arguments]
    if unknown:
        return f"error: {name} has no argument {unknown[0]!r}, only {', '.join(parameters['properties'])}"
    if missing:
        return f"error: {name} needs the argument {missing[0]!r}"
    try:
        return _TOOLS[name](**arguments)
    except ValueError as problem:
        return f"error: {problem}"


def tools_json(names: tuple[str, ...]) -> str:
    """The schemas of the named tools as the JSON string that a system message carries."""
    return json.dumps([TOOL_SCHEMAS[name] for name in names], ensure_ascii=False)
