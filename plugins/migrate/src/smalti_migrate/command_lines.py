"""The command line of a trainer's script in a .sh, .bat, .ps1 or .txt file, as options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_SET = re.compile(r"^\s*(?:export\s+|set\s+|\$env:|\$)?\"?([A-Za-z_]\w*)\s*=\s*(.*)$", re.IGNORECASE)
_USE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}|\$env:([A-Za-z_]\w*)|\$([A-Za-z_]\w*)|%([A-Za-z_]\w*)%", re.IGNORECASE)
_REMARK = re.compile(r"^\s*(#|::|rem\b|@rem\b)", re.IGNORECASE)
_CONTINUED = re.compile(r"[ \t]*(?<!\\)[\\^`][ \t]*$")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: the script that it runs, its options, and those of the launcher before it.

    An option is True as a switch, a text, or a list of texts. `unset` are variables that the file uses and does not set.
    """

    script: str
    options: dict[str, object]
    launcher: dict[str, object] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


def commands_in(text: str) -> list[Command]:
    """All commands of a file that run a Python script or `simpletuner`."""
    variables: dict[str, str] = {}
    found = []
    for line in _lines(text):
        setting = _SET.match(line)
        if setting is not None and not re.search(r"\.py\b", line):
            variables[setting[1].lower()] = _unquoted(setting[2])
            continue
        words, unset = words_of(line, variables)
        if (start := next((i for i, word in enumerate(words) if word.endswith(".py")), None)) is not None:
            script = re.split(r"[\\/]", words[start])[-1]
            launcher = options_of(words[:start])
            found.append(Command(script=script, options=options_of(words[start + 1 :]), launcher=launcher, unset=unset))
    return found


def _lines(text: str) -> Iterator[str]:
    """Lines without remarks, joined where one is continued or the next begins with an option."""
    joined, continued = "", False
    for line in filter(None, map(str.strip, text.splitlines())):
        if _REMARK.match(line):
            continue
        if not (continued or line.startswith("--")):
            yield joined
            joined = ""
        continued = _CONTINUED.search(line) is not None
        joined = f"{joined} {_CONTINUED.sub('', line)}"
    yield joined


def words_of(line: str, variables: Mapping[str, str]) -> tuple[list[str], tuple[str, ...]]:
    """The words of a command, with variables replaced by what the file sets, and the names of those that it does not set."""
    unset: list[str] = []

    def replace(match: re.Match[str]) -> str:
        name = next(group for index, group in enumerate(match.groups(), 1) if group is not None and index != 2)
        if (value := variables.get(name.lower(), match[2])) is not None:
            return value
        unset.append(name)
        return match[0]

    filled = _USE.sub(replace, line)
    lexer = shlex.shlex(filled, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    lexer.commenters = ""
    lexer.escape = ""  # backslashes of Windows' paths
    try:
        return list(lexer), tuple(dict.fromkeys(unset))
    except ValueError:  # a quote that is not closed
        return filled.split(), tuple(dict.fromkeys(unset))


def options_of(words: list[str]) -> dict[str, object]:
    """`--name value`, `--name=value` and `--name`; several values make a list, as for argparse's nargs."""
    found: dict[str, object] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            name, joined, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            found[name] = value if joined else True
        elif name:
            before = found[name]
            found[name] = word if before is True else [*before, word] if isinstance(before, list) else [before, word]
    return found


def _unquoted(text: str) -> str:
    text = text.strip()
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text.rstrip('"')
