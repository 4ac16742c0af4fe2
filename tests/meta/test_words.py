"""Names and messages use the terms of torch, diffusers, Accelerate and DeepSpeed: words that were retired do not come back."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from support.sources import nodes, tree

NAMES = {
    "at_odds": "conflicts",
    "at_rest": "eval_mode",
    "birth": "start_time",
    "blank": "empty",
    "call_roll": "diagnose",
    "corner": "crop",
    "corrupt": "add_noise",
    "crew": "FailureDetector",
    "cut": "crop, split, truncate",
    "deal": "distribute, scatter",
    "dealt": "distributed, scattered",
    "deals_head": "splits_heads",
    "deck": "BucketPermutation",
    "draw": "sample, plot",
    "drawn": "sampled, plotted",
    "foreign": "external",
    "gauge": "utilization",
    "hang_up": "abort",
    "invocation": "CommandLine",
    "judge": "check",
    "landed": "poll",
    "last_word": "exit_report",
    "lastword": "exit_report",
    "live_run": "RunWriter",
    "masters": "master_weights",
    "mend": "fix",
    "nursery": "warm_processes",
    "obey": "handle",
    "objection": "reject_reason",
    "outlast": "ignore_write_errors",
    "patience": "timeout",
    "picture": "image",
    "pre_emption": "preemption",
    "put_back": "copy_from",
    "rescue": "emergency_save",
    "side_channel": "background_communicator",
    "stand_in": "replacement, placeholder",
    "told": "conditioning, reported",
    "trade": "tradeoff",
    "untold": "unconditional",
    "usurper": "new_owner",
    "verdict": "report",
    "wish": "StepActions",
}
"""Words of names in snake_case, the plural included -> what to use instead."""
ALLOWED = {
    "patience": "the option --patience of smalti run watch",
    "eval_patience": "what early stopping calls it everywhere",
    "refuse_foreign_files": "files that no run has written, not checkpoints of other trainers",
}
"""Names that have such words all the same -> why."""
PHRASES = {
    r"(go|goes|going) on": "continue, resume",
    r"look after": "check",
    r"mend": "fix",
    r"not to be had": "not available, already in use",
    r"(?<!there )is no (?!longer|more)": "is not a",
    r"put up with": "accept",
    r"pictures?": "image",
    r"(give|gives|given) back": "return",
    r"hang up": "abort",
    r"pre-empt(ed|ion|s)?": "preempt",
    r"besides": "also",
    r"anew": "again",
    r"afresh": "again, with a new",
    r"deal(s|ing)? out": "split, distribute",
    r"dealt": "split, distributed",
    r"shar(e|es|ed|ing) out": "split, shard",
    r"(is|are|was) taken for": "is assumed to be",
    r"for ever": "forever",
    r"so many": "N, this many",
    r"told": "reported, given",
    r"leave word": "report",
    r"see whose": "check the owner of",
    r"untold": "unconditional",
}
"""Phrases of messages -> what to say instead."""


@pytest.fixture(scope="module")
def modules(root) -> dict[str, ast.Module]:
    """Every module of the core and of the packages beside it, by its path."""
    paths = [*(root / "core" / "src").rglob("*.py"), *root.glob("plugins/*/src/**/*.py")]
    return {str(path.relative_to(root)): tree(path) for path in sorted(paths)}


def names(module: ast.Module) -> Iterator[str]:
    """All names that a module defines: classes, functions, arguments, attributes and variables."""
    for node in nodes(module):
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name)
                | ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield name


@cache
def replacement(name: str) -> str:
    """What to use instead of a name that contains a retired word; empty for other names."""
    words = "_".join(re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)).lower()
    found = (better for word, better in NAMES.items() if re.search(rf"(?<![a-z]){word}s?(?![a-z])", words))
    return next(found, "") if name not in ALLOWED else ""


def messages(module: ast.Module) -> Iterator[tuple[int, str]]:
    """All texts of a module but its docstrings, except those of commands, which are their help."""
    commands = [
        node.body[0]
        for node in nodes(module)
        if isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(each) for each in node.decorator_list)
    ]
    docstrings = [node for node in nodes(module) if isinstance(node, ast.Expr) and node not in commands]
    internal = {node.value for node in docstrings}
    for node in nodes(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value and node not in internal:
            yield node.lineno, " ".join(node.value.split())


def test_no_name_contains_a_retired_word(modules):
    found = {(path, name, replacement(name)) for path, module in modules.items() for name in names(module)}
    assert [f"{path}: {name}: use {better}" for path, name, better in sorted(found) if better] == []


def test_no_message_contains_a_retired_phrase(modules):
    assert [
        f"{path}:{line}: {text!r}: say {better}"
        for path, module in modules.items()
        for line, text in messages(module)
        for phrase, better in PHRASES.items()
        if re.search(rf"\b{phrase}\b", text, flags=re.IGNORECASE)
    ] == []


def test_names_are_split_into_words():
    assert [replacement(name) for name in ("picture_heights", "_Wish", "put_back", "HangUps", "pictured", "swish")] == [
        *("image", "StepActions", "copy_from", "abort", "", "")
    ]


def test_messages_are_texts_and_the_help_of_commands():
    source = '@group.command("go")\ndef go():\n    """Help of go."""\n    "A note."\n    raise ValueError(f"{1} is broken")\n'
    assert [text for _, text in messages(ast.parse(source))] == ["Help of go.", "is broken"]
