"""Style sheet of the page."""

CSS = """
:root { color-scheme: light dark; --page: #f6f5f1; --card: #fcfcfb; --ink: #0b0b0b; --soft: #52514e; --faint: #7a7872;
  --line: #e1e0d9; --axis: #c3c2b7; --text: #2a78d6; --image: #d9622b; --learn: #1a8f66; --quiet: #b4b2a8;
  --token: #eeede8; --token-edge: #b9b7ad; --learn-back: #cdeedd; --learn-edge: #3f9a74; --image-back: #fbe3d6;
  --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #111110; --card: #1a1a19; --ink: #f4f3ee; --soft: #c3c2b7;
  --faint: #98968c; --line: #2f2f2c; --axis: #4a4944; --text: #4b95ea; --image: #e5793f; --learn: #2bab7e;
  --quiet: #6a6861; --token: #262624; --token-edge: #56544d; --learn-back: #123d2d; --learn-edge: #2f8f6a;
  --image-back: #4a2513; --bad: #f2887f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
p { margin: 0 0 12px; max-width: 80ch; color: var(--soft); }
p.flags { max-width: none; }
code { font: 13px ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
.card, .sample, .figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.keys { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 20px; }
.key { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.key span { display: block; color: var(--soft); font-size: 13px; }
.key b { display: block; font-size: 24px; line-height: 1.3; font-weight: 600; }
.key.wrong b { color: var(--bad); }
.charts { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 12px; }
@media (max-width: 1080px) { .charts { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 600px) { .charts { grid-template-columns: minmax(0, 1fr); } }
.charts.wide { grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); margin-bottom: 12px; }
.figure { margin: 0; padding: 14px 16px 10px; }
.figure h3 { margin-bottom: 6px; }
.figure svg { display: block; width: 100%; max-width: 560px; height: auto; margin: 0; }
.legend { color: var(--soft); font-size: 13px; margin: 0 0 6px; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin: 0 5px -1px 0; }
.legend span { margin-right: 16px; white-space: nowrap; }
svg text { font-size: 11px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg .name { font-size: 12px; }
svg .label, svg .value, svg .strong { font-size: 12px; }
svg .strong, svg .value { fill: var(--ink); }
svg .strong { font-weight: 600; }
svg .note { fill: var(--ink); }
svg .grid { stroke: var(--line); }
svg .axis { stroke: var(--axis); }
svg .marker { stroke: var(--ink); stroke-dasharray: 3 3; opacity: .65; }
p:not(.flags) code { white-space: nowrap; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 8px 16px; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
th { font-weight: 600; color: var(--soft); font-size: 13px; white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.chosen td { font-weight: 600; }
.meter { display: inline-block; width: 90px; height: 8px; border-radius: 4px; background: var(--line);
  margin-left: 10px; overflow: hidden; vertical-align: 1px; }
.meter i { display: block; height: 100%; background: var(--text); }
.sample { padding: 16px 18px; margin-bottom: 12px; }
.sample header { display: flex; flex-wrap: wrap; gap: 2px 18px; align-items: baseline; margin-bottom: 12px; }
.sample header span, .more { color: var(--soft); font-size: 13px; }
.figures { display: flex; flex-wrap: wrap; gap: 16px; margin-bottom: 14px; }
figure { margin: 0; max-width: 100%; overflow-x: auto; }
.shown { display: flex; gap: 12px; align-items: flex-end; }
.tiles { display: grid; gap: 2px; padding: 2px; background: var(--image); width: max-content; }
.tiles.thumbnail { background: var(--quiet); }
.tiles img { display: block; }
.crisp { image-rendering: pixelated; }
figcaption { color: var(--soft); font-size: 12.5px; margin-top: 4px; max-width: 340px; }
.tokens { font: 13px/2 ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 30em; overflow-y: auto; }
.token, .image { background: var(--token); border-left: 1px solid var(--token-edge); padding: 2px 0; }
.target { background: var(--learn-back); border-left-color: var(--learn-edge); }
.special { color: var(--faint); }
.target.special { color: var(--learn); }
.token i { font-style: normal; color: var(--faint); }
.image { background: var(--image-back); border-left-color: var(--image); padding: 2px 7px; }
.key-tokens { margin-bottom: 12px; color: var(--soft); font-size: 13px; }
.key-tokens span { margin-right: 4px; color: var(--ink);
  font: 13px ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; }
.key-tokens .special { color: var(--faint); }
"""
