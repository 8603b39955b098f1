"""The tools compute exactly, refuse what they must, and answer every call with one short line."""

import json
import time

import pytest

from dataset.builtin.world import build_world
from dataset.tools import LOOKUP_FIELDS, TOOL_SCHEMAS, calculate, calendar, lookup, run_tool, tools_json


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("345 + 278", "623"),
        ("12 - 30", "-18"),
        ("999*999", "998001"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("7 // 2", "3"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("-(3 + 4) * 2", "-14"),
        ("+5", "5"),
        ("0.1 + 0.2", "0.3"),
        ("1.5e3", "1500"),
        ("2 ** -1", "0.5"),
        (" ( 1 + 2 ) * ( 3 + 4 ) ", "21"),
    ],
)
def test_calculate_gives_exact_results(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "empty"),
        ("1 +", "not an arithmetic expression"),
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("10 ** 999 * 10 ** 999", "too large"),
        ("1e308 * 1e308", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("__import__('os').getcwd()", "only numbers"),
        ("open", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("True + 1", "only numbers"),
        ("1 << 3", "only + - * /"),
        ("1 if 2 else 3", "only numbers"),
        ("1j", "only numbers"),
        ("1" * 300, "at most 200"),
        ("(" * 150, "not an arithmetic expression"),
        ("-" * 100 + "1", "nested deeper"),
        ("1\x00", "not an arithmetic expression"),
    ],
)
def test_calculate_refuses_with_the_reason(expression, complaint):
    with pytest.raises(ValueError, match=None) as caught:
        calculate(expression)
    assert complaint in str(caught.value)


def test_calculate_refuses_other_types():
    with pytest.raises(ValueError, match="must be text, got int"):
        calculate(5)


def test_hostile_expressions_take_no_time():
    started = time.perf_counter()
    for expression in ("9**9**9**9", "10**999**2", "2**(10**9)", "((((9**99)**9)**9)**9)", "1.0000001**1e18", "0**-1"):
        assert run_tool("calculate", {"expression": expression}).startswith("error: ")
    assert time.perf_counter() - started < 1.0


def test_lookup_answers_in_the_language_of_the_name():
    world = build_world()
    for person in world.people:
        assert lookup(person.name.en, "age") == lookup(person.name.zh, "age") == str(person.age)
        assert lookup(person.name.en.upper(), "home") == person.home.name.en
        assert lookup(person.name.zh, "home") == person.home.name.zh
        assert lookup(person.name.zh, "sibling") == world.sibling(person).name.zh
        assert lookup(person.name.en, "friend") == world.friend(person).name.en


def test_lookup_refuses_unknown_names_and_fields():
    with pytest.raises(ValueError, match="nobody called 'Zoe'"):
        lookup("Zoe", "age")
    with pytest.raises(ValueError, match="no field 'weight', only age"):
        lookup("Mira", "weight")


def test_calendar_knows_days():
    assert calendar("2024-05-17") == "Friday"
    assert calendar("2000-02-29") == "Tuesday"
    assert calendar("2024-02-28", "2024-03-01") == "2"
    assert calendar("2024-03-01", "2024-02-28") == "-2"
    for bad in ("2023-02-29", "17.5.2024", "", 5):
        with pytest.raises(ValueError, match="YYYY-MM-DD"):
            calendar(bad)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("calculate", {"expression": "2 + 3"}, "5"),
        ("lookup", {"name": "米拉", "field": "home"}, build_world().find("Mira").home.name.zh),
        ("calendar", {"date": "2024-05-17"}, "Friday"),
        ("search", {}, "error: no tool 'search'"),
        ("calculate", {}, "error: calculate needs the argument 'expression'"),
        ("calculate", {"expression": "1", "precision": 2}, "error: calculate has no argument 'precision'"),
        ("calculate", "1 + 1", "error: arguments of calculate must be an object"),
        ("calculate", {"expression": ["1"]}, "error: expression must be text"),
        ("lookup", {"name": 5, "field": "age"}, "error: name and field must be text"),
        ("lookup", {"name": "Zoe", "field": "age"}, "error: nobody called"),
        ("calendar", {"date": None}, "error: not a date"),
    ],
)
def test_run_tool_gives_results_and_error_lines(name, arguments, result):
    given = run_tool(name, arguments)
    assert given.startswith(result) and "\n" not in given


def test_schemas_have_the_form_that_clients_expect():
    for name, schema in TOOL_SCHEMAS.items():
        assert schema["type"] == "function" and schema["function"]["name"] == name
        parameters = schema["function"]["parameters"]
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert schema["function"]["description"]
    assert json.loads(tools_json(("lookup", "calculate"))) == [TOOL_SCHEMAS["lookup"], TOOL_SCHEMAS["calculate"]]
    assert all(not lookup("Mira", field).startswith("error") for field in LOOKUP_FIELDS)
