// Markdown of a model as it arrives. The text is hostile: raw HTML is shown as text, pictures and links load nothing
// by themselves, and everything passes DOMPurify. Finished blocks are drawn once and never again.
import { Lexer, Marked } from "../vendor/marked.js";
import DOMPurify from "../vendor/purify.js";
import { t } from "./i18n.js";

const LONG_TAIL = 3000; // characters of an unfinished block from which its finished part is drawn for good
const PIECE = 2000; // characters that are taken in one frame, so that a burst or a slow machine delays no frame for long
const WHOLE_BLOCK = 6000; // a longer block is drawn in pieces even when it is whole
const TAGS = [
  "p", "br", "hr", "em", "strong", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a", "span", "div",
  "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "input",
];
const CLEAN = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "class", "start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ADD_URI_SAFE_ATTR: ["align", "start"],
  RETURN_DOM_FRAGMENT: true,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

export const escaped = (text) =>
  text.replace(/[&<>"']/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[letter]);

const math = {
  blockMath: {
    name: "blockMath",
    level: "block",
    start: (source) => source.match(/^(?:\$\$|\\\[)/m)?.index,
    tokenizer(source) {
      const found = /^(?:\$\$([\s\S]{1,4000}?)\$\$|\\\[([\s\S]{1,4000}?)\\\])[ \t]*(?:\n|$)/.exec(source);
      return found ? { type: "blockMath", raw: found[0], text: (found[1] ?? found[2]).trim() } : undefined;
    },
    renderer: (token) => `<pre class="math">${escaped(token.text)}</pre>\n`,
  },
  inlineMath: {
    name: "inlineMath",
    level: "inline",
    start: (source) => source.match(/\$|\\\(/)?.index,
    tokenizer(source) {
      const found = /^(?:\$\$?(?!\s)([^$\n]{1,500}?)(?<![\s\\])\$\$?(?!\d)|\\\(([^\n]{1,500}?)\\\))/.exec(source);
      return found ? { type: "inlineMath", raw: found[0], text: found[1] ?? found[2] } : undefined;
    },
    renderer: (token) => `<code class="math">${escaped(token.text)}</code>`,
  },
};

const renderer = {
  html: ({ text }) => (/^<br\s*\/?>$/i.test(text.trim()) ? "<br>" : escaped(text)),
  image: ({ href, text }) => `<span class="picture-link">${escaped(t("markdown.picture", { text: text || "–", href }))}</span>`,
  code({ text, lang }) {
    const language = (lang ?? "").trim().split(/\s/)[0].slice(0, 40);
    return `<div class="code" title="${escaped(language)}"><pre><code>${escaped(text)}</code></pre></div>\n`;
  },
  link({ href, title, tokens }) {
    const text = this.parser.parseInline(tokens);
    if (!/^(?:https?|mailto):/i.test(href)) return `<span title="${escaped(href.slice(0, 200))}">${text}</span>`;
    return `<a href="${escaped(href)}" title="${escaped(title || href)}">${text}</a>`;
  },
};

const marked = new Marked({ gfm: true, breaks: false, renderer, extensions: undefined });
marked.use({ extensions: [math.blockMath, math.inlineMath] });

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.tagName === "INPUT") {
    node.setAttribute("type", "checkbox");
    node.setAttribute("disabled", "");
    node.setAttribute("aria-hidden", "true");
  }
});

function drawn(tokens) {
  const fragment = DOMPurify.sanitize(marked.parser(tokens), CLEAN);
  for (const code of fragment.querySelectorAll(".code")) frame(code);
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = document.createElement("div");
    scroll.className = "table";
    scroll.tabIndex = 0;
    table.replaceWith(scroll);
    scroll.append(table);
  }
  return fragment;
}

function frame(block) {
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const name = document.createElement("span");
  name.textContent = block.title || t("markdown.text");
  block.removeAttribute("title");
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet small";
  button.dataset.copy = "";
  button.textContent = t("copy");
  bar.append(name, button);
  block.prepend(bar);
  block.querySelector("pre").tabIndex = 0;
}

/** Split a long block that is still growing: [what is finished, what may still change] of the same kind, or null. */
function split(token) {
  const { raw } = token;
  if (token.type === "code" && /^ {0,3}(?:```|~~~)/.test(raw)) {
    const cut = raw.lastIndexOf("\n");
    const open = raw.slice(0, raw.indexOf("\n") + 1);
    if (cut <= open.length) return null;
    const mark = open.trim().match(/^(?:`+|~+)/)[0];
    return [`${raw.slice(0, cut)}\n${mark}`, open + raw.slice(cut + 1)];
  }
  if (token.type === "table") {
    const cut = raw.trimEnd().lastIndexOf("\n");
    const head = raw.split("\n", 2).join("\n") + "\n";
    return cut + 1 > head.length ? [raw.slice(0, cut + 1), head + raw.slice(cut + 1)] : null;
  }
  if (token.type === "list") {
    if (token.items.length > 1) {
      const last = token.items.at(-1).raw.length;
      const at = raw.trimEnd().length - token.items.at(-1).raw.trimEnd().length;
      return last < raw.length ? [raw.slice(0, at), raw.slice(at)] : null;
    }
    return null;
  }
  if (token.type === "paragraph" || token.type === "text" || token.type === "html" || token.type === "heading") {
    const cut = Math.max(raw.lastIndexOf("\n", raw.length - 200), raw.lastIndexOf(" ", raw.length - 200));
    const at = cut > LONG_TAIL / 2 ? cut + 1 : raw.length - 200;
    return [raw.slice(0, at), raw.slice(at)];
  }
  if (token.type === "blockquote") {
    const cut = raw.trimEnd().lastIndexOf("\n");
    return cut > LONG_TAIL / 2 ? [raw.slice(0, cut + 1), raw.slice(cut + 1)] : null;
  }
  return null;
}

/** Draws into ``root`` what ``update`` is given; each call passes the whole text so far. Long texts take some frames. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.frame = 0;
    this.clear();
  }

  clear() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.root.replaceChildren();
    this.text = ""; // what is drawn
    this.target = ""; // what is to be drawn
    this.done = false;
    this.again = false;
    this.frozen = 0; // characters that are drawn for good
    this.rest = ""; // what stands for the text after them: may repeat a table's head or a code's fence
    this.joined = null; // kind of block that the next finished piece goes on with
    this.links = {};
    this.tail = []; // nodes of the unfinished block
    this.blocks = 0; // finished blocks drawn, for tests and measurements
    this.lastNode = null;
    this.defined = false;
  }

  /** ``done``: nothing follows. A text that is not a continuation of the last one is drawn anew. */
  update(text, done = false) {
    if (text.includes("\r")) text = text.replaceAll("\r", ""); // the lexer counts lines that end in \n alone
    if (!text.startsWith(this.text)) this.clear();
    this.target = text;
    this.done = done;
    if (!this.frame) this.step();
  }

  flush() {
    while (this.frame) {
      cancelAnimationFrame(this.frame);
      this.step();
    }
  }

  step() {
    this.frame = 0;
    const piece = this.target.slice(this.text.length, this.text.length + PIECE);
    this.text += piece;
    this.rest += piece;
    const whole = this.text.length === this.target.length;
    this.advance(whole && this.done);
    if (whole && this.done && this.defined && !this.again) this.restart();
    else if (!whole) this.frame = requestAnimationFrame(() => this.step());
  }

  lex(source) {
    const lexer = new Lexer(marked.defaults);
    lexer.tokens.links = { ...this.links }; // an unfinished definition must not stay
    return lexer.lex(source);
  }

  advance(done) {
    let tokens = this.lex(this.rest);
    const last = tokens.findLastIndex((token) => token.type !== "space");
    const keep = done ? tokens.length : Math.max(0, last);
    for (let i = 0; i < keep; i++) {
      this.finish(tokens[i]);
      if (!done) this.rest = this.rest.slice(tokens[i].raw.length);
    }
    if (done) {
      this.rest = "";
      this.drawTail([]);
      return;
    }
    tokens = tokens.slice(keep);
    if (tokens.length > 0 && tokens[0].raw.length > LONG_TAIL) {
      const parts = split(tokens[0]);
      if (parts !== null) {
        const after = this.rest.slice(tokens[0].raw.length);
        this.finish(this.lex(parts[0])[0], true);
        this.rest = parts[1] + after;
        tokens = this.lex(this.rest);
      }
    }
    this.drawTail(tokens);
  }

  finish(token, more = false) {
    if (token.type === "def") {
      this.defined = true;
      this.links[token.tag] ??= { href: token.href, title: token.title };
    }
    if (token.type === "space" || token.type === "def") return;
    if (token.raw.length > WHOLE_BLOCK && !more) {
      this.inPieces(token);
      return;
    }
    this.drawTail([]);
    const fragment = drawn([token]);
    if (this.joined !== null && this.joined === token.type && this.join(fragment)) {
    } else {
      this.lastNode = fragment.lastElementChild ?? this.lastNode;
      this.root.append(fragment);
      this.blocks += 1;
    }
    this.joined = more ? token.type : null;
  }

  inPieces(token) {
    let raw = token.raw;
    for (;;) {
      const head = raw.slice(0, WHOLE_BLOCK);
      const first = this.lex(head)[0];
      const parts = raw.length > WHOLE_BLOCK && first !== undefined ? split(first) : null;
      if (parts === null) {
        this.finish(raw.length > WHOLE_BLOCK ? { type: "paragraph", raw, text: raw, tokens: [plain(raw)] } : (first ?? token), true);
        break;
      }
      this.finish(this.lex(parts[0])[0], true);
      const left = parts[1] + head.slice(first.raw.length) + raw.slice(WHOLE_BLOCK);
      if (left.length >= raw.length) {
        this.finish({ type: "paragraph", raw: left, text: left, tokens: [plain(left)] }, true);
        break;
      }
      raw = left;
    }
    this.joined = null;
  }

  join(fragment) {
    const into = this.lastNode;
    const from = fragment.lastElementChild;
    if (!into || !from || into.tagName !== from.tagName) return false;
    const pick = (node) => node.querySelector("tbody") ?? node.querySelector("pre > code") ?? node;
    const [target, source] = [pick(into), pick(from)];
    if (target.tagName === "CODE") target.append("\n");
    target.append(...source.childNodes);
    return true;
  }

  drawTail(tokens) {
    for (const node of this.tail) node.remove();
    this.tail = [];
    if (tokens.length === 0) return;
    const fragment = drawn(tokens);
    if (this.joined !== null && this.joined === tokens[0].type && this.joinTail(fragment)) return;
    this.tail = [...fragment.childNodes];
    this.root.append(fragment);
  }

  /** The unfinished rest of a block that is drawn already, put into it for now. */
  joinTail(fragment) {
    const into = this.lastNode;
    const from = fragment.lastElementChild;
    if (!into || !from || into.tagName !== from.tagName) return false;
    const pick = (node) => node.querySelector("tbody") ?? node.querySelector("pre > code") ?? node;
    const [target, source] = [pick(into), pick(from)];
    this.tail = target.tagName === "CODE" ? [document.createTextNode("\n"), ...source.childNodes] : [...source.childNodes];
    target.append(...this.tail);
    return true;
  }

  restart() {
    const { target, links } = this;
    this.clear();
    Object.assign(this, { target, links, done: true, again: true });
    this.step();
  }
}

const plain = (text) => ({ type: "text", raw: text, text, escaped: false });
