"""Markdown in the browser: the same whether it comes at once or in pieces, finished parts drawn once, nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from tests.page.injections import injections
from tests.page.scripted import ScriptedServer

HARNESS = """
async () => {
  const { MarkdownView } = await import("/static/page/markdown.js");
  window.shown = (pieces) => {
    const root = document.createElement("div");
    const view = new MarkdownView(root);
    let text = "";
    const marks = [];
    for (const piece of pieces) {
      text += piece;
      view.update(text);
      marks.push([...root.children]);
    }
    view.update(text, true);
    view.flush();
    return { root, view, marks };
  };
}
"""
SAMPLE = """# A title

A paragraph with **strong**, *soft*, `code` and a [link](https://example.org/a).
It has two lines.

| name | value |
|------|------:|
| a    | 1     |
| b    | 2     |

1. first
2. second
   - inner

   a second paragraph
3. third

```python
def f(x):
    return x * 2  # <b>
```

> quoted
> twice

Formula $x_1^2 + y_1^2$ and \\(a*b*c\\), price $5 and $6.

$$
\\sum_{i=1}^{n} x_i
$$

- [x] done
- [ ] open

---

See [the reference][1].

[1]: https://example.org/ref
"""


def _whole(page: Any, text: str) -> str:
    page.evaluate(HARNESS)
    return str(page.evaluate("(text) => shown([text]).root.innerHTML", text))


def test_a_sample_is_drawn_with_its_parts(scripted: ScriptedServer, look: Callable[..., Any]) -> None:
    with look(f"http://127.0.0.1:{scripted.port}") as (page, _):
        html = _whole(page, SAMPLE)
        for part in (
            "<h1>A title</h1>", "<strong>strong</strong>", 'href="https://example.org/a"', "<td align=\"right\">1</td>",
            "<li><p>second</p>", "return x * 2  # &lt;b&gt;", "<blockquote>", '<code class="math">x_1^2 + y_1^2</code>',
            '<code class="math">a*b*c</code>', "price $5 and $6", '<pre class="math">\\sum_{i=1}^{n} x_i</pre>',
            'href="https://example.org/ref"', 'rel="noopener noreferrer nofollow"', "data-copy",
        ):  # fmt: skip
            assert part in html, part


@pytest.mark.parametrize("seed", range(4))
def test_pieces_make_what_the_whole_makes(seed: int, scripted: ScriptedServer, look: Callable[..., Any]) -> None:
    random = Random(seed)
    pieces, left = [], SAMPLE
    while left:
        size = random.choice((1, 2, 3, 7, 20, 80))
        pieces.append(left[:size])
        left = left[size:]
    with look(f"http://127.0.0.1:{scripted.port}") as (page, _):
        whole = _whole(page, SAMPLE)
        assert page.evaluate("(pieces) => shown(pieces).root.innerHTML", pieces) == whole


def test_long_blocks_grow_without_being_drawn_again(scripted: ScriptedServer, look: Callable[..., Any]) -> None:
    growing = {
        "table": "| a | b |\n|---|---|\n" + "".join(f"| row {i} | value |\n" for i in range(300)),
        "ol": "".join(f"{i + 1}. item {i}\n" for i in range(300)),
        "pre": "```\n" + "".join(f"line {i}\n" for i in range(450)) + "```\n",
        "p": " ".join(f"word{i}" for i in range(1300)),
    }
    with look(f"http://127.0.0.1:{scripted.port}") as (page, _):
        page.evaluate(HARNESS)
        for name, text in growing.items():
            pieces = [text[at : at + 50] for at in range(0, len(text), 50)]
            found = page.evaluate(
                """([pieces, name]) => {
                    const { root, marks } = shown(pieces);
                    const middle = marks[Math.floor(marks.length * 0.9)];
                    return {
                      kept: middle.slice(0, -1).every((node) => node.isConnected || root.contains(node)),
                      first: root.contains(middle[0]),
                      blocks: root.querySelectorAll(name).length,
                      text: root.textContent,
                      children: root.children.length,
                    };
                }""",
                [pieces, name],
            )
            assert found["kept"], name
            assert found["first"], name
            assert found["blocks"] == 1, name
            last = {"table": "row 299", "ol": "item 299", "pre": "line 449", "p": "word1299"}[name]
            assert found["text"].count(last) == 1, name
            if name == "pre":
                assert "line 250\nline 251\n" in found["text"]


def test_a_hundred_injections_run_nothing(scripted: ScriptedServer, look: Callable[..., Any]) -> None:
    hostile = injections()
    assert len(hostile) >= 100
    with look(f"http://127.0.0.1:{scripted.port}") as (page, watched):
        page.evaluate(HARNESS)
        slow = page.evaluate(
            """async (texts) => {
                const { MarkdownView } = await import("/static/page/markdown.js");
                const slow = [];
                for (const [index, text] of texts.entries()) {
                  for (const size of [text.length, Math.max(7, Math.ceil(text.length / 40))]) {
                    const pieces = [];
                    for (let at = 0; at < text.length; at += size) pieces.push(text.slice(at, at + size));
                    let longest = 0;
                    const root = document.createElement("div");
                    document.getElementById("root").append(root);
                    const view = new MarkdownView(root);
                    const timed = (action) => {
                      const begun = performance.now();
                      action();
                      longest = Math.max(longest, performance.now() - begun);
                    };
                    let sofar = "";
                    for (const piece of [...pieces, null]) {
                      if (piece !== null) sofar += piece;
                      timed(() => view.update(sofar, piece === null));
                    }
                    while (view.frame) {
                      cancelAnimationFrame(view.frame);
                      timed(() => view.step());
                    }
                    for (const node of root.querySelectorAll("*")) {
                      for (const { name, value } of node.attributes) {
                        if (/^on|^style$|^src/.test(name) || /script:|data:/i.test(name === "href" ? value : "")) {
                          slow.push(`${index}: ${name}=${value}`);
                        }
                      }
                      if (/^(SCRIPT|STYLE|IFRAME|OBJECT|EMBED|SVG|MATH|FORM|BASE|LINK|META|IMG)$/i.test(node.tagName)) {
                        slow.push(`${index}: ${node.tagName}`);
                      }
                    }
                    if (longest > 500) slow.push(`${index}: ${Math.round(longest)} ms, ${text.slice(0, 20)}`);
                    root.querySelectorAll("a").forEach((a) => a.dispatchEvent(new MouseEvent("mouseover", { bubbles: true })));
                    await new Promise((done) => setTimeout(done, 0));
                    root.remove();
                  }
                }
                return slow;
            }""",
            list(hostile),
        )
        assert slow == []
        page.wait_for_timeout(300)
        assert page.evaluate("window.owned") is None
        watched.check()
