"""`cyxjax completion bash|zsh|fish`: prints a script that completes `cyxjax` commands in a shell.

The script is self-contained: completing a command does not start Python.
"""

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache

from cyxjax.cli.main import ROWS, dispatch
from cyxjax.command import Parser, show
from cyxjax.errors import EXIT_OK

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9._-]*[a-z0-9]")
_CHOICE = re.compile(r"(?<!\S)[({]?([a-z0-9]+(?:[|,][a-z0-9]+)+)[)}]?(?!\S)")  # a|b|c, (a | b), {a,b,c}
_BASH = """# cyxjax for bash: eval "$(cyxjax completion bash)" in ~/.bashrc
_cyxjax() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" options="" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
        *)
            [ "$COMP_CWORD" -eq 2 ] || words=""
            COMPREPLY=($(compgen -W "$words" -- "$word") $([ -n "$words" ] || compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _cyxjax cyxjax
"""
# for zsh itself, not bash's through bashcompinit, which leaves out the space after a word
_ZSH = """# cyxjax for zsh: eval "$(cyxjax completion zsh)" in ~/.zshrc
(( $+functions[compdef] )) || {{ autoload -U compinit && compinit }}
_cyxjax() {{
    local -a commands options words_here
    if (( CURRENT == 2 )); then
        commands=({commands})
        _describe command commands
        return
    fi
    case "$words[2]" in
{cases}
    esac
    if [[ "$PREFIX" == -* ]]; then compadd -- $options
    elif (( CURRENT == 3 && $#words_here )); then compadd -- $words_here
    else _files; fi
}}
compdef _cyxjax cyxjax
"""


def main(argv: Sequence[str]) -> int:
    """Prints the script; exit code 0."""
    given = _parser().parse_args(argv)
    write = {"bash": bash, "zsh": zsh, "fish": fish}[given.shell]
    show(write({name: options_of(name) for name in ROWS}))
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax completion",
        description="Prints a script that completes commands, options and files in a shell.",
        epilog='example: eval "$(cyxjax completion bash)"    '
        "(in ~/.bashrc; in zsh, zsh; in fish, pipe it to source)",
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def options_of(command: str) -> list[str]:
    """The options in the help pages of a command and of its subcommands."""
    pages = [
        _page(command),
        *(_page(command, below) for below in words_of(command) if command != "completion"),
    ]
    return sorted({"--help", *_OPTION.findall("".join(pages))})


def words_of(command: str) -> list[str]:
    """The words that may follow a command; for checkpoint: ls, verify, export, prune."""
    usage = _page(command).partition("\n\n")[0].replace(" | ", "|")
    return [word for group in _CHOICE.findall(usage) for word in re.split(r"[|,]", group)]


@cache
def _page(*words: str) -> str:
    page = io.StringIO()
    with redirect_stdout(page), suppress(SystemExit):
        dispatch([*words, "--help"])
    return page.getvalue()


def bash(options: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(
        f'        {name}) options="{" ".join(known)}" words="{" ".join(words_of(name))}" ;;'
        for name, known in options.items()
    )
    return _BASH.format(commands=" ".join(options), cases=cases)


def zsh(options: Mapping[str, Sequence[str]]) -> str:
    commands = " ".join(shlex.quote(f"{name}:{text}") for name, (_, text) in ROWS.items())
    cases = "\n".join(
        f"        {name}) options=({' '.join(known)}); words_here=({' '.join(words_of(name))}) ;;"
        for name, known in options.items()
    )
    return _ZSH.format(commands=commands, cases=cases)


def fish(options: Mapping[str, Sequence[str]]) -> str:
    lines = ["# cyxjax for fish: cyxjax completion fish | source"]
    for name, known in options.items():
        text = ROWS[name][1].replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c cyxjax -n __fish_use_subcommand -f -a {name} -d '{text}'")
        inside = f"'__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c cyxjax -n {inside} -l {option.removeprefix('--')}" for option in known]
        lines += [f"complete -c cyxjax -n {inside} -f -a '{' '.join(words_of(name))}'"] * bool(words_of(name))
    return "\n".join(lines) + "\n"
