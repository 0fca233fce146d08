"""Builds HTML. Every text from a file or a user is escaped by `text` before it reaches the page.

The style sheet: light and dark, one column on a phone, nothing folded in print.
"""

import html
from collections.abc import Iterable, Mapping, Sequence

from cyxjax.redaction import redact

_LONGEST = 2000  # characters of one text from a file or user
_CHOICES = 3


def text(value: object) -> str:
    """`value` as text that is safe in HTML: escaped, without control characters and secrets."""
    raw = str(value)
    raw = raw if len(raw) <= _LONGEST else raw[:_LONGEST] + " ..."
    shown = "".join(
        c if c.isprintable() else " " if c in "\t\n" else "\N{REPLACEMENT CHARACTER}" for c in raw
    )
    return html.escape(redact(shown), quote=True)


def table(head: Sequence[object], rows: Iterable[Sequence[object]], style: str = "") -> str:
    """A table, which scrolls on its own if it is wide; cells are text or `Markup`."""
    top = "".join(f"<th>{_cell(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(c)}</td>" for c in row) + "</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="{style}"><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def choice(label: str, parts: Mapping[str, str]) -> str:
    """At most `_CHOICES` parts, of which the reader selects one (initially the first), without a script."""
    if len(parts) < 2:
        return "".join(parts.values())
    switches, shown = "", ""
    for i, (name, inside) in enumerate(parts.items()):
        switches += f'<input type="radio" name="choice" id="choice-{i}"{" checked" * (not i)}>'
        switches += f'<label for="choice-{i}">{text(name)}</label>'
        shown += f'<div class="choice-{i}">{inside}</div>'
    return f'<div class="choice"><span>{text(label)}</span>{switches}{shown}</div>'


class Markup(str):
    """HTML from this package, which is not escaped again."""


def _cell(value: object) -> str:
    return value if isinstance(value, Markup) else text(value)


def section(title: str, *parts: str) -> str:
    """A part of the page with its heading; "" if it is empty."""
    inside, name = "".join(parts), title.lower().replace(" ", "-")
    return f'<section id="{name}"><h2>{text(title)}</h2>{inside}</section>' if inside else ""


def more(summary: str, inside: str) -> str:
    """A section that is collapsed until the reader opens it; open in print."""
    return f"<details><summary>{text(summary)}</summary>{inside}</details>" if inside else ""


def paragraph(line: str, style: str = "note") -> str:
    return f'<p class="{style}">{text(line)}</p>'


_CHOICE = "".join(f"#choice-{i}:checked~.choice-{i}{{display:block}}" for i in range(_CHOICES))
_CSS = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d8dee4;--tile:#f6f8fa;
--good:#1a7f37;--bad:#cf222e;--c0:#0969da;--c1:#bc4c00;--c2:#1a7f37;--c3:#8250df;--c4:#bf3989;--c5:#1b7c83;
--c6:#9a6700;--c7:#6e7781;--c8:#cf222e;--c9:#0a3069}
@media (prefers-color-scheme:dark){:root{--paper:#0d1117;--ink:#e6edf3;--soft:#9198a1;--rule:#30363d;
--tile:#161b22;--good:#3fb950;--bad:#ff7b72;--c0:#58a6ff;--c1:#f0883e;--c2:#3fb950;--c3:#bc8cff;--c4:#f778ba;
--c5:#39c5cf;--c6:#d29922;--c7:#8b949e;--c8:#ff7b72;--c9:#cae8ff}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:20px 16px 60px;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.6rem;margin:.2em 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2em 0 .6em;border-bottom:1px solid var(--rule);padding-bottom:.25em}
h3{font-size:1rem;margin:1.2em 0 .4em}
p{margin:.4em 0;overflow-wrap:anywhere}
.lead{font-size:1.1rem}.note{color:var(--soft)}.good{color:var(--good)}.bad{color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(178px,1fr));gap:10px;margin:1em 0}
.tile{background:var(--tile);border:1px solid var(--rule);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:1.2rem;white-space:nowrap;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:18px}
figure{margin:0;min-width:0}figcaption{font-size:.9rem;min-height:1.6em}
svg{display:block;width:100%;height:auto}svg text{font-size:13px;fill:var(--soft)}
svg.bar{height:34px;border-radius:6px}
.grid{stroke:var(--rule);fill:none}.line{fill:none;stroke:var(--c);stroke-width:2;stroke-linejoin:round}
.line.dashed{stroke-dasharray:6 4}.faint{opacity:.3;stroke-width:1}.dot{fill:var(--c)}.fill{fill:var(--c)}
.values{fill:transparent}.values:hover{fill:var(--soft);fill-opacity:.12}
svg text.bad{fill:var(--bad);font-weight:bold}
.mark{stroke:var(--soft);fill:none}.mark.save{stroke-width:2}.mark.resume{stroke-dasharray:3 3}
.mark.restart{stroke:var(--c6);stroke-dasharray:3 3}.mark.rollback{stroke:var(--bad)}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}
.c6{--c:var(--c6)}.c7{--c:var(--c7)}.c8{--c:var(--c8)}.c9{--c:var(--c9)}
.key{display:inline-block;margin-left:.8em;color:var(--soft);overflow-wrap:anywhere}
.swatch{display:inline-block;width:14px;height:4px;margin-right:5px;vertical-align:middle;background:var(--c);
print-color-adjust:exact}
.swatch.dashed{background:repeating-linear-gradient(90deg,var(--c) 0 5px,transparent 5px 8px)}
ul.keys{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:2px 18px;font-size:.9rem}
ul.keys .swatch{height:11px}
.wide{overflow-x:auto;max-width:100%;margin:.7em 0}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:3px 10px;border-bottom:1px solid var(--rule);vertical-align:top;
overflow-wrap:anywhere}
th{color:var(--soft);font-weight:600;overflow-wrap:normal}
table.numbers td:not(:first-child),table.numbers th:not(:first-child){text-align:right;white-space:nowrap}
.name{display:inline-block;min-width:9em;white-space:normal;text-align:left}.sentence{min-width:26em}
table.heat td,table.heat th{text-align:center;white-space:nowrap;padding:3px 6px;min-width:2.4em}
table.heat td i{display:block;font-style:normal;border-radius:3px;padding:1px 4px;print-color-adjust:exact;
background:color-mix(in srgb,var(--c) var(--share),transparent)}
.samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(110px,1fr));gap:12px}
.samples img{width:100%;max-width:220px;image-rendering:pixelated;border:1px solid var(--rule)}
.samples figcaption{font-size:.8rem;color:var(--soft)}.samples figcaption.bad{color:var(--bad)}
table.texts td{white-space:pre-wrap;font-family:ui-monospace,"DejaVu Sans Mono",monospace;font-size:.8rem;
min-width:12em}
.choice>div{display:none;margin-top:.6em}.choice>span{color:var(--soft)}
.choice>input{margin:0 .3em 0 .9em}.choice label{cursor:pointer}
details{margin:.8em 0}summary{cursor:pointer;color:var(--soft)}
footer{margin-top:3em;color:var(--soft);font-size:.85rem}
@media (max-width:600px){body{font-size:15px;padding:12px 12px 40px}svg text{font-size:21px}
.tiles{grid-template-columns:1fr 1fr}.tile b{font-size:1.15rem}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--rule:#bbb;--tile:#fff}
body{max-width:none;font-size:11pt}
section,figure,.tile,tr{break-inside:avoid}section{break-inside:auto}.wide{overflow:visible}
details::details-content{content-visibility:visible;height:auto}.plots{grid-template-columns:1fr 1fr}}
"""
CSS = _CSS + _CHOICE
