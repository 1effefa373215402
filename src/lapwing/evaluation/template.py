"""The HTML template of a report: style, structure, and a few lines of script that sort tables."""

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ heading }}</title>
<style>
  :root { {{ light | safe }} --page: #ffffff; --card: #f6f8fa; --line: #d8dce2; --good: #14532d; --bad: #9a3412; }
  @media (prefers-color-scheme: dark) { :root { {{ dark | safe }} --page: #0d1117; --card: #161b22; --line: #30363d;
    --good: #86efac; --bad: #fdba74; } }
  @media print { :root { {{ light | safe }} --page: #ffffff; --card: #ffffff; --line: #d8dce2; --good: #14532d;
    --bad: #9a3412; } }
  * { box-sizing: border-box; }
  body { font: 16px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: var(--1f2328);
         background: var(--page); max-width: 1120px; margin: 2.2rem auto; padding: 0 1.25rem;
         overflow-wrap: break-word; }
  dd, .rows td, .items li, figcaption { overflow-wrap: anywhere; }
  .scroll { overflow-x: auto; }
  h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .2rem; }
  h2 { font-size: 1.25rem; margin: 2.6rem 0 .3rem; padding-top: 1rem; border-top: 1px solid var(--line); }
  h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
  p { max-width: 46rem; margin: .3rem 0 .8rem; }
  .byline, .note, caption, figcaption, .span, .gap { color: var(--59636e); }
  .byline, .note { font-size: .9rem; }
  .findings { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--2b6cb0);
              border-radius: 6px; padding: .9rem 1.2rem .9rem 2.2rem; margin: 1.2rem 0; max-width: 54rem; }
  .findings li { margin: .35rem 0; }
  table { border-collapse: collapse; margin: 1rem 0 .4rem; font-variant-numeric: tabular-nums; }
  caption { text-align: left; font-size: .9rem; padding-bottom: .3rem; }
  th, td { padding: .4rem .8rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
  thead th { vertical-align: bottom; border-bottom: 2px solid var(--59636e); }
  tbody th, thead th.head { text-align: left; }
  tbody th { font-weight: 600; }
  th:first-child, td:first-child { padding-left: 0; }
  thead button { font: inherit; font-weight: 600; color: inherit; background: none; border: 0; padding: 0;
                 cursor: pointer; text-align: inherit; border-bottom: 1px dotted var(--59636e); }
  thead th[aria-sort="ascending"] button::after { content: " ↑"; }
  thead th[aria-sort="descending"] button::after { content: " ↓"; }
  .value { display: block; }
  .span, .gap { display: block; font-size: .78rem; }
  .span { white-space: nowrap; }
  .better .value { font-weight: 700; color: var(--good); }
  .better .value::after { content: " ▲"; font-size: .7em; }
  .worse .value { color: var(--bad); }
  .worse .value::after { content: " ▼"; font-size: .7em; }
  .pictures { display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start; margin: 1rem 0; }
  .pictures figure { margin: 0; flex: 0 1 auto; max-width: 100%; }
  .pictures svg { display: block; overflow: visible; width: 100%; height: auto; }
  .pictures figcaption { font-size: .85rem; }
  .items { display: grid; grid-template-columns: repeat(auto-fill, minmax(92px, 1fr)); gap: .8rem; margin: .6rem 0;
           padding: 0; list-style: none; }
  .items li { font-size: .8rem; line-height: 1.35; }
  .items img { width: 100%; max-width: 120px; image-rendering: pixelated; border: 1px solid var(--line); display: block;
               background: #ffffff; margin-bottom: .2rem; }
  .rows td, .rows th { text-align: left; font-size: .9rem; }
  .wrong { color: var(--bad); }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; font-size: .9rem; margin: .6rem 0; }
  dt { color: var(--59636e); }
  dd { margin: 0; }
  a { color: var(--2b6cb0); }
  footer { margin: 3rem 0 1rem; font-size: .85rem; color: var(--59636e); }
  @media (max-width: 720px) {
    body { margin: 1.2rem auto; padding: 0 .9rem; }
    .findings { padding: .7rem .9rem .7rem 1.6rem; }
    table, tbody, tr, td, tbody th, caption { display: block; }
    thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
    tr { padding: .5rem 0; border-bottom: 1px solid var(--line); }
    td, tbody th { border: 0; padding: .15rem 0; text-align: left; }
    td { display: grid; grid-template-columns: 6.5rem 1fr; column-gap: .6rem; }
    td::before { content: attr(data-label); color: var(--59636e); font-size: .85rem; }
    td .span, td .gap { grid-column: 2; white-space: normal; }
    .pictures figure { width: 100% !important; }
    dl { grid-template-columns: 1fr; }
    dd { margin-bottom: .4rem; }
  }
  @media print {
    body { font-size: 11px; max-width: none; margin: 0; }
    h2 { break-after: avoid; }
    figure, tr, .items li, .findings { break-inside: avoid; }
    thead button { border: 0; }
    .screen { display: none; }
  }
</style>
</head>
<body>
<header>
<h1>{{ heading }}</h1>
<p class="byline">{{ date }} · {{ facts.versions }}</p>
{% for line in notes %}
<p>{{ line }}</p>
{% endfor %}
</header>
<main>
<section aria-labelledby="found">
<h2 id="found">What came out</h2>
<ul class="findings">
{% for line in findings %}
<li>{{ line }}</li>
{% endfor %}
</ul>
<p class="note">Numbers in brackets are 95 % intervals: what other test items might have given.</p>
</section>
{% for section in sections %}
<section aria-labelledby="s{{ loop.index }}">
<h2 id="s{{ loop.index }}">{{ section.title }}</h2>
{% if section.text %}<p>{{ section.text }}</p>{% endif %}
{% for table in section.tables %}
<div class="scroll"><table role="table">
<caption>{{ table.caption }}</caption>
<thead role="rowgroup"><tr role="row">
{% for head in table.heads %}
<th scope="col" role="columnheader" class="head"><button type="button">{{ head }}</button></th>
{% endfor %}
{% for name, meaning in table.columns %}
<th scope="col" role="columnheader"><button type="button" title="{{ meaning }}">{{ name }}</button></th>
{% endfor %}
</tr></thead>
<tbody role="rowgroup">
{% for row in table.rows %}
<tr role="row">
{% for head in row.heads %}
<th scope="row" role="rowheader" data-rank="{{ head }}">{{ head }}</th>
{% endfor %}
{% for cell in row.cells %}
<td role="cell" data-label="{{ table.columns[loop.index0][0] }}" data-rank="{{ cell.rank }}" class="{{ cell.mark }}">
<span class="value">{{ cell.text }}</span>
{% if cell.span %}<span class="span">{{ cell.span }}</span>{% endif %}
{% if cell.gap %}<span class="gap">{{ cell.gap }}</span>{% endif %}
</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% if loop.first %}<p class="note">{{ legend }}</p>{% endif %}
{% if section.pictures %}
<div class="pictures">
{% for picture in section.pictures %}
<figure style="width: {{ picture.width }}px">{{ picture.svg | safe }}
<figcaption>{{ picture.words }}</figcaption></figure>
{% endfor %}
</div>
{% endif %}
{% for list in section['items'] %}
{% if list.examples %}
<h3>{{ list.title }}</h3>
{% if list.pictures %}
<ol class="items">
{% for item in list.examples %}
<li><img src="{{ item.png }}" alt="{{ item.alt }}" title="{{ item.alt }}">
{% if item.answer %}{% if item.truth %}{{ item.truth }} → {% endif %}
<span class="{{ 'wrong' if item.wrong }}">{{ item.answer }}</span><br>{% endif %}
{{ item.certainty }}</li>
{% endfor %}
</ol>
{% else %}
<table role="table" class="rows">
<caption>{{ list.order }}</caption>
<thead role="rowgroup"><tr role="row">
{% for head in list.heads %}<th scope="col" role="columnheader">{{ head }}</th>{% endfor %}
</tr></thead>
<tbody role="rowgroup">
{% for item in list.examples %}
<tr role="row">
{% for head in list.heads %}<td role="cell" data-label="{{ head }}">{{ item[head] }}</td>{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
{% endif %}
{% endif %}
{% endfor %}
</section>
{% endfor %}
<section aria-labelledby="made">
<h2 id="made">How this was made</h2>
<dl>
{% for name, value in facts.items() %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% for name, about in settings.items() %}
<h3>{{ name }}</h3>
<dl>
{% for key, value in about.items() %}<dt>{{ key }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% endfor %}
</section>
</main>
<footer>Written by Lapwing. This page holds all it needs and loads nothing.</footer>
<script>
document.querySelectorAll("thead button").forEach((button) => button.addEventListener("click", () => {
  const head = button.closest("th"), table = button.closest("table"), body = table.tBodies[0];
  const place = [...head.parentNode.children].indexOf(head), up = head.getAttribute("aria-sort") !== "ascending";
  const rank = (row) => row.children[place].dataset.rank;
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [rank(a), rank(b)], [m, n] = [parseFloat(x), parseFloat(y)];
    if (place && (isNaN(m) || isNaN(n))) return isNaN(m) && isNaN(n) ? x.localeCompare(y) : isNaN(m) ? 1 : -1;
    const order = isNaN(m) || isNaN(n) ? x.localeCompare(y) : m - n;
    return up ? order : -order;
  });
  table.querySelectorAll("th[aria-sort]").forEach((th) => th.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  body.append(...rows);
}));
</script>
</body>
</html>
"""
