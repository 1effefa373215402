"""A report as one HTML file: the table, the pictures (embedded) and what they mean."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
  body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; color: #1f2328;
         max-width: 1080px; margin: 2.5rem auto; padding: 0 1.25rem; background: #fff; }
  h1 { font-size: 1.5rem; margin: 0 0 .4rem; }
  h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
  p { max-width: 46rem; margin: .3rem 0 .8rem; color: #3d444d; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; margin: 1rem 0 .4rem; font-variant-numeric: tabular-nums; }
  th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb; }
  td { white-space: nowrap; }
  th { font-weight: 600; vertical-align: bottom; max-width: 8rem; color: #59636e; border-bottom: 1.5px solid #9ca3af; }
  th:first-child, td:first-child { text-align: left; padding-left: 0; }
  td.best { font-weight: 700; color: #1d4f8c; }
  .note { font-size: .85rem; color: #6b7280; }
  img { max-width: 100%; height: auto; display: block; }
  footer { margin: 3rem 0 1rem; font-size: .8rem; color: #6b7280; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
{% for line in notes %}<p>{{ line }}</p>
{% endfor %}
<div class="scroll"><table>
<thead><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}<tr>
{%- for cell, best in row %}<td{% if best %} class="best"{% endif %}>{{ cell }}</td>{% endfor -%}
</tr>
{% endfor %}</tbody>
</table></div>
<p class="note">{{ legend }}</p>
{% for picture in pictures %}
<h2>{{ picture.title }}</h2>
<p>{{ picture.text }}</p>
<img alt="{{ picture.title }}" width="{{ picture.width }}" src="data:image/png;base64,{{ picture.png }}">
{% endfor %}
<footer>Written by lapwing.</footer>
</body>
</html>
"""


def render(
    *,
    title: str,
    notes: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[tuple[str, bool]]],
    legend: str,
    pictures: "Sequence[tuple[str, str, Figure]]",
) -> str:
    """The page. Rows are (cell, whether it is the best of its column); pictures are (title, text, figure)."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("the HTML report needs jinja2: pip install 'lapwing-torch[report]'") from error
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE)
    embedded = [_embed(name, text, figure) for name, text, figure in pictures]
    return template.render(title=title, notes=notes, header=header, rows=rows, legend=legend, pictures=embedded)


def _embed(title: str, text: str, figure: "Figure") -> Mapping[str, str | int]:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    png = base64.b64encode(buffer.getvalue()).decode("ascii")
    return {"title": title, "text": text, "png": png, "width": round(figure.get_figwidth() * 100)}
