"""`cyxjax completion bash|zsh|fish`: what a shell needs to complete the words of `cyxjax`.

The script is text that stands by itself: a shell that completes does not start Python.
"""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress

from cyxjax.command import Parser, show
from cyxjax.errors import EXIT_OK

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9._-]*[a-z0-9]")
_BASH = """# cyxjax for bash: eval "$(cyxjax completion bash)" in ~/.bashrc
_cyxjax() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" options=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands} --help --version" -- "$word"))
        return
    fi
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
    case "$word" in
        -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
        *) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _cyxjax cyxjax
"""
_ZSH = """# cyxjax for zsh: eval "$(cyxjax completion zsh)" in ~/.zshrc
autoload -U +X bashcompinit && bashcompinit
"""


def main(argv: Sequence[str]) -> int:
    """Prints the script; exit code 0."""
    given = _parser().parse_args(argv)
    from cyxjax.cli.main import ROWS

    options = {name: options_of(name) for name in ROWS}
    texts = {name: text for name, (_, text) in ROWS.items()}
    show(fish(options, texts) if given.shell == "fish" else _ZSH * (given.shell == "zsh") + bash(options))
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser(
        prog="cyxjax completion",
        description="Prints a script by which a shell completes commands, options and files.",
        example='eval "$(cyxjax completion bash)"    (in ~/.bashrc; in zsh, zsh; in fish, pipe it to source)',
    )
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])
    return parser


def options_of(command: str) -> list[str]:
    """The options that a command's help page names."""
    from cyxjax.cli.main import dispatch

    page = io.StringIO()
    with redirect_stdout(page), suppress(SystemExit):
        dispatch([command, "--help"])
    return sorted({"--help", *_OPTION.findall(page.getvalue())})


def bash(options: Mapping[str, Sequence[str]]) -> str:
    cases = "\n".join(f'        {name}) options="{" ".join(known)}" ;;' for name, known in options.items())
    return _BASH.format(commands=" ".join(options), cases=cases)


def fish(options: Mapping[str, Sequence[str]], texts: Mapping[str, str]) -> str:
    lines = ["# cyxjax for fish: cyxjax completion fish | source"]
    for name, known in options.items():
        said = texts[name].replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c cyxjax -n __fish_use_subcommand -f -a {name} -d '{said}'")
        inside = f"'__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c cyxjax -n {inside} -l {option.removeprefix('--')}" for option in known]
    return "\n".join(lines) + "\n"
