"""How the page of an audit looks: one sheet, two sets of colours, nothing fetched."""

from __future__ import annotations

from typing import Final

from holdfast.audit.model import Fate

STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2430; --soft: #5b6775; --faint: #8a95a3; --rule: #e3e7ec;
  --seen: #c9dcf3; --unseen: #eef0f3; --stripe: #cfd5dc; --lag: #7f9cc4;
  --proven: #14804a; --proven-back: #e3f5ea; --failed: #c01f2e; --failed-back: #fdeaea;
  --inconclusive: #96640a; --inconclusive-back: #fdf3dc;
  --output: #3f7fd6; --aggregated: #6f63d8; --superseded: #86a3cb; --filtered: #a9b4c0; --duplicate: #b196dc;
  --late: #dfae3f; --dead_letter: #e08142; --erased: #c9a66b; --pending: #d5dae1;
  --lost: #d3202f; --duplicated: #cc1e96; --extra: #7a22c4; --altered: #8a4b14;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11151b; --card: #191f28; --ink: #e4e9f0; --soft: #9aa7b6; --faint: #6e7b8b; --rule: #2a323d;
    --seen: #2c4a72; --unseen: #222a34; --stripe: #3a4552; --lag: #5c7fb3;
    --proven: #5ed598; --proven-back: #12301f; --failed: #ff7b84; --failed-back: #3a161a;
    --inconclusive: #f0c05a; --inconclusive-back: #352810;
    --output: #5b97ea; --aggregated: #8d82f0; --superseded: #5d7ba6; --filtered: #66727f; --duplicate: #a184d3;
    --late: #d9a93f; --dead_letter: #e28a4e; --erased: #a3824a; --pending: #3d4753;
    --lost: #ff4d5b; --duplicated: #f657c1; --extra: #b26bff; --altered: #d08a4a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif;
}
main { max-width: 1060px; margin: 0 auto; padding: 28px 20px 60px; }
header { margin-bottom: 20px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 4px; }
.sub { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
section, .verdict {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px; margin: 14px 0;
}
section > p { color: var(--soft); margin: 0 0 12px; font-size: 14px; }
.verdict { border-left-width: 6px; }
.verdict strong { font-size: 22px; display: block; overflow-wrap: anywhere; }
.verdict p { margin: 4px 0 0; overflow-wrap: anywhere; }
.verdict.proven { border-left-color: var(--proven); background: var(--proven-back); }
.verdict.proven strong { color: var(--proven); }
.verdict.failed { border-left-color: var(--failed); background: var(--failed-back); }
.verdict.failed strong { color: var(--failed); }
.verdict.inconclusive { border-left-color: var(--inconclusive); background: var(--inconclusive-back); }
.verdict.inconclusive strong { color: var(--inconclusive); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 10px; margin: 14px 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 11px 14px; }
.tile b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; line-height: 1.3; }
.tile span { color: var(--soft); font-size: 13px; }
.tile.bad { border-color: var(--failed); background: var(--failed-back); }
.tile.bad b { color: var(--failed); }
.tile.good b { color: var(--proven); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th {
  text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; white-space: nowrap;
  border-bottom: 1px solid var(--rule); padding: 4px 14px 6px 0;
}
td { border-bottom: 1px solid var(--rule); padding: 7px 14px 7px 0; vertical-align: top; overflow-wrap: break-word; }
td.w { white-space: nowrap; }
td.long { overflow-wrap: anywhere; min-width: 9em; }
tr:last-child td { border-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.zero { color: var(--faint); }
td.bad { color: var(--failed); font-weight: 700; }
tr.sum td { font-weight: 600; }
code { font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.chip { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.legend li { white-space: normal; }
.legend {
  display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; color: var(--soft);
  margin: 8px 0 0; padding: 0; list-style: none;
}
ul.plain { margin: 0; padding: 0; list-style: none; }
ul.plain li { padding: 7px 0; border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
ul.plain li:last-child { border-bottom: 0; }
ul.plain b { font-weight: 600; }
.gap b { color: var(--inconclusive); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 5px 18px; margin: 0; font-size: 14px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { color: var(--soft); font-size: 13px; margin-top: 22px; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .tick { fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }
svg .label { font-size: 12.5px; }
svg .on { fill: #ffffff; font-size: 11px; font-variant-numeric: tabular-nums; }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--faint); stroke-width: 1; }
svg .seen { fill: var(--seen); } svg .unseen { fill: var(--unseen); }
svg .stripe { stroke: var(--stripe); stroke-width: 2; }
svg .lag { fill: var(--lag); } svg .lag.none { fill: var(--seen); }
@media print { body { background: #fff; } section, .tile, .verdict { break-inside: avoid; } }
"""


def sheet() -> str:
    """The whole sheet, with a colour for each fate in plots (`fate lost`) and in legends (`chip lost`)."""
    fates = "".join(
        f"svg .fate.{fate} {{ fill: var(--{fate}); }} .chip.{fate} {{ background: var(--{fate}); }}\n"
        for fate in Fate
    )
    return (
        STYLE
        + fates
        + ".chip.seen { background: var(--seen); } .chip.unseen { background: var(--stripe); }\n"
    )
