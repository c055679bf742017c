// The conversation that is open. The view follows an answer only when it stood at the end.
import { html, useEffect, useRef, useState } from "./html.js";
import { takeUp } from "./answers.js";
import { addFiles, draft, setText } from "./drafts.js";
import { useEngine } from "./engine.js";
import { language, t } from "./i18n.js";
import { Icon } from "./icons.js";
import { Message, Asking } from "./message.js";
import { place, use } from "./state.js";

const NEAR_END = 48; // pixels

export function Thread() {
  const current = use((s) => s.current);
  const opening = use((s) => s.opening);
  const asking = use((s) => (s.asking?.at === place(s) ? s.asking : null));
  const scroll = useRef(null);
  const content = useRef(null);
  const atEnd = useRef(true);
  const lastTop = useRef(0);
  const [away, setAway] = useState(false);
  const toEnd = () => {
    if (scroll.current) scroll.current.scrollTop = scroll.current.scrollHeight;
  };
  useEffect(() => {
    const follow = new ResizeObserver(() => atEnd.current && toEnd());
    follow.observe(content.current);
    follow.observe(scroll.current);
    return () => follow.disconnect();
  }, []);
  useEffect(() => {
    atEnd.current = true;
    setAway(false);
    toEnd();
    if (current) takeUp(current);
  }, [current?.id]);
  useEffect(() => {
    if (!asking) return;
    atEnd.current = true;
    toEnd();
  }, [asking]);
  const scrolled = () => {
    if (!scroll.current) return;
    const { scrollTop, scrollHeight, clientHeight } = scroll.current;
    // growing content moves nothing: only who scrolls up leaves the end
    if (scrollHeight - scrollTop - clientHeight < NEAR_END) atEnd.current = true;
    else if (scrollTop < lastTop.current) atEnd.current = false;
    lastTop.current = scrollTop;
    if (away === atEnd.current) setAway(!atEnd.current);
  };
  const messages = current?.messages ?? [];
  return html`
    <div class="thread" ref=${scroll} onScroll=${scrolled} tabindex="0" role="region" aria-label=${t("chat")}>
      <div class="measure" ref=${content} aria-busy=${opening !== null}>
        ${messages.length === 0 && !asking && opening === null && html`<${Empty} />`}
        ${messages.map((message, index) => html`<${Message} key=${message.id} message=${message} last=${index === messages.length - 1} />`)}
        ${asking && html`<${Asking} asking=${asking} />`}
      </div>
    </div>
    ${away && html`<button type="button" class="to-end" aria-label=${t("chat.to_end")} title=${t("chat.to_end")}
      onClick=${() => { atEnd.current = true; toEnd(); }}><${Icon} name="down" /></button>`}
  `;
}

/** Before the first question: three pictures to try, and the engine's state when it cannot answer yet. */
function Empty() {
  const examples = use((s) => s.session)?.examples ?? [];
  const engine = useEngine();
  return html`
    <div class="empty-chat">
      <h2>${t("empty.title")}</h2>
      <p class="muted">${t(engine.kind === "ok" || engine.kind === "unknown" ? "empty.text" : "empty.not_ready")}</p>
      <ul class="examples">
        ${examples.slice(0, 3).map((one) => html`<li key=${one.file}><${Example} one=${one} /></li>`)}
      </ul>
    </div>
  `;
}

const exampleAddress = (file) => (file.includes("/") ? file : `static/examples/${file}`);

function Example({ one }) {
  const question = (language() === "zh" ? one.question_zh : one.question_en) ?? one.question_en;
  const take = async () => {
    const response = await fetch(exampleAddress(one.file));
    const blob = await response.blob();
    addFiles([new File([blob], one.file.split("/").at(-1), { type: blob.type })]);
    if (!draft().text) setText(question);
    document.getElementById("question")?.focus();
  };
  return html`
    <button type="button" class="example" onClick=${take}>
      <img src=${exampleAddress(one.file)} alt="" loading="lazy" />
      <span>${question}</span>
    </button>
  `;
}

