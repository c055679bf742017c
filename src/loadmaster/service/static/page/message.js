// One message: what was asked with its pictures, or what was answered with its numbers.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { askQuestion, useAnswer, useAnswering } from "./answers.js";
import { problemWords } from "./api.js";
import { copy } from "./clipboard.js";
import { repository } from "./conversations.js";
import { Dialog } from "./dialog.js";
import { FixLine } from "./findings.js";
import { number, seconds } from "./format.js";
import { t, useLanguage } from "./i18n.js";
import { Icon } from "./icons.js";
import { MarkdownView } from "./markdown.js";
import { sentParameters } from "./parameters.js";
import { remember, remembered } from "./storage.js";
import { notify, use } from "./state.js";

export function Message({ message, last }) {
  const answer = useAnswer(message.id);
  if (message.role === "user") return html`<${Question} message=${message} />`;
  const now = answer ?? message;
  return html`<${Reply} message=${message} now=${now} live=${answer !== null} last=${last} />`;
}

// ------------------------------------------------------------------------------------------- questions

/** A question that the server has not accepted yet. */
export const Asking = ({ asking }) => html`
  <article class="message user pending" aria-label=${t("you")}>
    <div class="pictures">${asking.pictures.map((one) => html`<img key=${one.url} src=${one.url} alt=${one.name} />`)}</div>
    <p class="said">${asking.text}</p>
    <p class="facts">${t("message.sending")}</p>
  </article>
`;

function Question({ message }) {
  const [editing, setEditing] = useState(remembered(`edit.${message.id}`, "") !== "");
  const busy = useAnswering(use((s) => s.current?.id));
  if (editing) return html`<${Edit} message=${message} done=${() => setEditing(false)} />`;
  return html`
    <article class="message user" aria-label=${t("you")}>
      ${message.pictures?.length > 0 && html`<div class="pictures">${message.pictures.map((one) => html`<${SentPicture} key=${one.sha256} picture=${one} />`)}</div>`}
      ${message.text && html`<p class="said">${message.text}</p>`}
      <div class="actions">
        <${Action} icon="copy" name=${t("copy")} onClick=${() => copy(message.text)} />
        <${Action} icon="pencil" name=${t("edit")} disabled=${busy} onClick=${() => setEditing(true)} />
      </div>
    </article>
  `;
}

/** Only Cancel throws an edit away: it outlives Escape and a reload. */
function Edit({ message, done }) {
  const name = `edit.${message.id}`;
  const ref = useRef(null);
  const [busy, setBusy] = useState(false);
  useEffect(() => ref.current.focus(), []);
  const send = async () => {
    setBusy(true);
    try {
      await askQuestion({ regenerate: message.id, text: ref.current.value, parameters: sentParameters() });
      done();
    } catch (error) {
      setBusy(false);
      notify(problemWords(error), "problem");
    }
  };
  const keys = (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape") done();
    if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) send();
  };
  return html`
    <article class="message user editing" aria-label=${t("you")}>
      <textarea ref=${ref} rows="4" aria-label=${t("edit")} defaultValue=${remembered(name, "") || message.text} onInput=${(e) => remember(name, e.currentTarget.value)} onKeyDown=${keys}></textarea>
      <p class="muted small-text">${t("edit.help")}</p>
      <div class="row end">
        <button type="button" onClick=${() => { remember(name, ""); done(); }}>${t("cancel")}</button>
        <button type="button" class="primary" disabled=${busy} onClick=${send}>${t("edit.send")}</button>
      </div>
    </article>
  `;
}

export function SentPicture({ picture }) {
  const [address, setAddress] = useState(null);
  const [open, setOpen] = useState(false);
  useEffect(() => {
    repository().pictureAddress(picture.sha256).then(setAddress);
  }, [picture.sha256]);
  const { width, height, original_width: ow, original_height: oh } = picture;
  const name = picture.name || t("picture.unnamed");
  const size = ow && (ow !== width || oh !== height)
    ? t("picture.sent_as", { from: `${number(ow)} × ${number(oh)}`, to: `${number(width)} × ${number(height)}` })
    : `${number(width)} × ${number(height)}`;
  return html`
    <figure>
      <button type="button" class="plain" aria-label=${t("picture.enlarge", { name })} onClick=${() => setOpen(true)}>
        ${address && html`<img src=${address} alt=${name} width=${width} height=${height} loading="lazy" />`}
      </button>
      <figcaption>${size}</figcaption>
      ${open && html`<${Dialog} title=${name} wide=${true} onClose=${() => setOpen(false)}><img class="enlarged" src=${address} alt=${name} /><p class="muted">${size}</p><//>`}
    </figure>
  `;
}

// ------------------------------------------------------------------------------------------- answers

function Reply({ message, now, live, last }) {
  const state = live ? now.state : message.state;
  const text = now.text ?? "";
  const busy = useAnswering(use((s) => s.current?.id));
  const again = (body) => async () => {
    try {
      await askQuestion({ ...body, parameters: sentParameters() });
    } catch (error) {
      notify(problemWords(error), "problem");
    }
  };
  const retry = again({ regenerate: message.id });
  const cut = message.numbers?.finish_reason === "length";
  const goOn = last && !live && text !== "" && (state === "stopped" || state === "failed" || cut);
  return html`
    <article class="message assistant" aria-label=${t("answer")} aria-busy=${live}>
      <${Thinking} text=${now.thinking ?? ""} running=${live && text === ""} />
      <${Markdown} text=${text} done=${!live} />
      <${Progress} answer=${live ? now : null} />
      ${!live && state === "stopped" && html`<p class="note">${t("message.stopped")}</p>`}
      ${!live && cut && state === "done" && html`<p class="note">${t("message.cut")}</p>`}
      ${message.again && html`<${Failure} error=${message.again} title=${"message.failed_again"} retry=${retry} busy=${busy} />`}
      ${!live && state === "failed" && html`<${Failure} error=${now.error} title=${text ? "message.failed_midway" : "message.failed"} retry=${retry} busy=${busy} />`}
      ${now.numbers?.changes && html`<p class="note">${now.numbers.changes}</p>`}
      ${now.numbers?.forgotten > 0 && html`<p class="note">${t("message.forgotten", { n: now.numbers.forgotten })}</p>`}
      <${Numbers} numbers=${now.numbers} />
      ${!live &&
      html`<div class="actions">
        ${text && html`<${Action} icon="copy" name=${t("copy")} onClick=${() => copy(text)} />`}
        <${Action} icon="again" name=${t("regenerate")} disabled=${busy} onClick=${retry} />
        ${goOn && html`<${Action} icon="forward" name=${t("continue")} disabled=${busy} onClick=${again({ continue: message.id })} />`}
      </div>`}
    </article>
  `;
}

const Action = ({ icon, name, ...rest }) => html`<button type="button" class="action" ...${rest}><${Icon} name=${icon} /><span>${name}</span></button>`;

function Markdown({ text, done }) {
  const root = useRef(null);
  const view = useRef(null);
  const words = useLanguage();
  useLayoutEffect(() => {
    if (view.current === null || view.current.words !== words) {
      view.current = new MarkdownView(root.current);
      view.current.words = words;
    }
    view.current.update(text, done);
  }, [text, done, words]);
  const clicked = (event) => {
    const button = event.target.closest("[data-copy]");
    if (button) copy(button.closest(".code").querySelector("pre").textContent);
  };
  return html`<div class="markdown" ref=${root} onClick=${clicked}></div>`;
}

function Thinking({ text, running }) {
  if (!text) return null;
  return html`
    <details class="thinking">
      <summary><${Icon} name="thought" />${t(running ? "thinking.now" : "thinking")}</summary>
      <p>${text}</p>
    </details>
  `;
}

/** What happens while there is nothing to read yet. */
function Progress({ answer }) {
  const [, tick] = useState(0);
  const idle = answer !== null && answer.state !== "answering";
  useEffect(() => {
    if (!idle) return;
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [idle]);
  if (!idle) return null;
  const time = seconds(Math.floor((performance.now() - answer.begun) / 1000));
  const words = {
    waiting: () => t("message.waiting", { time }),
    queued: () => (answer.place === null ? t("message.queued") : t("message.queued_at", { n: answer.place })),
    thinking: () => t("message.thinking", { time }),
    lost: () => t("message.lost"),
  }[answer.state];
  return words ? html`<p class="progress"><span class="pulse" aria-hidden="true"></span>${words()}</p>` : null;
}

function Failure({ error, title, retry, busy }) {
  const known = error ?? { code: "unknown", message: "" };
  return html`
    <div class="banner problem" role="alert">
      <p><strong>${t(title)}</strong> ${problemWords(known)}</p>
      ${(known.findings ?? []).slice(0, 2).map((one) => html`<p>${one.cause || one.title}</p>${(one.fixes ?? []).slice(0, 1).map((fix) => html`<${FixLine} fix=${fix} />`)}`)}
      <button type="button" disabled=${busy} onClick=${retry}><${Icon} name="again" />${t("retry")}</button>
    </div>
  `;
}

function Numbers({ numbers }) {
  if (!numbers) return null;
  const parts = [];
  if (numbers.first_token_s != null) parts.push(t("numbers.first", { time: seconds(numbers.first_token_s) }));
  if (numbers.tokens_per_s != null) parts.push(t("numbers.rate", { rate: number(numbers.tokens_per_s, numbers.tokens_per_s < 10 ? 1 : 0) }));
  if (numbers.image_tokens) parts.push(t("numbers.image", { n: numbers.image_tokens }));
  if (numbers.completion_tokens != null) parts.push(t("numbers.answer", { n: numbers.completion_tokens }));
  return parts.length > 0 ? html`<p class="numbers">${parts.map((part, i) => html`<span key=${i}>${part}${i < parts.length - 1 ? " · " : ""}</span>`)}</p>` : null;
}
