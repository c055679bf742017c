// Where a question is written: text, pictures, and what goes with them.
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";
import { askQuestion, beginConversation, stopAnswer, useAnswering } from "./answers.js";
import { problemWords } from "./api.js";
import { Camera, cameraHere } from "./camera.js";
import { Crop } from "./crop.js";
import { addFiles, clearDraft, holdDraft, openDraft, removePicture, setText, uploaded, useDraft } from "./drafts.js";
import { number, size } from "./format.js";
import { t } from "./i18n.js";
import { Icon, IconButton } from "./icons.js";
import { ParametersDrawer, sentParameters, setParameters, useParameters } from "./parameters.js";
import { forgetUploads } from "./repository.js";
import { refreshSession } from "./session.js";
import { model, notify, place, store, use } from "./state.js";

const ACCEPT = "image/*";

export function Composer() {
  const current = use((s) => s.current);
  const text = useDraft((d) => d.text);
  const pictures = useDraft((d) => d.pictures);
  const asking = use((s) => s.asking?.at === place(s));
  const refusal = use((s) => s.refusal);
  const session = use((s) => s.session);
  const settings = use((s) => s.settings);
  const area = useRef(null);
  const files = useRef(null);
  const phone = useRef(null);
  const [camera, setCamera] = useState(false);
  const running = useAnswering(current?.id ?? null);
  useEffect(() => {
    openDraft(current?.id ?? null);
  }, [current?.id]);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight, window.innerHeight * 0.4)}px`;
  }, [text]);
  const ready = pictures.some((one) => one.state === "ready");
  const reading = pictures.some((one) => one.state === "reading");
  const can = (text.trim() !== "" || ready) && !asking && !running && session !== null;
  const send = async () => {
    if (!can) return;
    const sent = holdDraft();
    const parameters = sentParameters();
    const mine = { at: place(store.get()) };
    let to = current;
    const over = () => store.get().asking?.mine === mine && store.set({ asking: null });
    store.set({ refusal: null, asking: { at: mine.at, mine, text, pictures: pictures.filter((one) => one.state === "ready").map(({ url, name }) => ({ url, name })) } });
    try {
      const ask = async () => {
        const facts = await uploaded(sent);
        to ??= await beginConversation(mine, sent);
        await askQuestion({ text: sent.text, pictures: facts.map((one) => one.sha256), picture_facts: facts, parameters }, to);
      };
      await ask().catch((error) => {
        if (error.code !== "picture_missing") throw error;
        forgetUploads();
        return ask();
      });
      clearDraft(sent);
      over();
    } catch (error) {
      // the draft is as it was: nothing typed is lost
      over();
      if (mine.at === place(store.get())) store.set({ refusal: { code: error.code, message: error.message, retryAfter: error.retryAfter, findings: error.findings ?? [] } });
      else notify(problemWords(error), "problem");
      if (["storage_browser", "storage_full", "storage_failed", "read_only"].includes(error.code)) await refreshSession();
      if (error.status === 401) store.set({ login: { error: null } });
    }
    area.current?.focus();
  };
  const keys = (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    if (event.shiftKey || (matchMedia("(pointer: coarse)").matches && !event.metaKey && !event.ctrlKey)) return;
    event.preventDefault();
    send();
  };
  const paste = (event) => {
    const found = [...(event.clipboardData?.files ?? [])];
    if (found.length === 0) return;
    // text that comes with pictures goes in too, unless it only names their files
    const lines = event.clipboardData.getData("text/plain").split(/[\r\n]+/);
    if (lines.every((line) => line === "" || found.some((one) => line.endsWith(one.name)))) event.preventDefault();
    addFiles(found);
  };
  const pick = (event) => {
    addFiles([...event.currentTarget.files]);
    event.currentTarget.value = "";
  };
  const photograph = () => (matchMedia("(pointer: coarse)").matches || !cameraHere() ? phone.current.click() : setCamera(true));
  return html`
    <footer class="composer" id="composer">
      <div class="measure">
        <${ParametersDrawer} />
        ${refusal && html`<${Refusal} refusal=${refusal} retry=${send} can=${can} />`}
        <div class="box">
          ${pictures.length > 0 && html`<ul class="previews" aria-label=${t("pictures")}>${pictures.map((one) => html`<${Preview} key=${one.id} one=${one} />`)}</ul>`}
          <textarea id="question" ref=${area} rows="1" value=${text} aria-label=${t("composer.label")} placeholder=${t("composer.hint")}
            onInput=${(e) => setText(e.currentTarget.value)} onKeyDown=${keys} onPaste=${paste}></textarea>
          <div class="tools">
            <${IconButton} icon="picture" label=${t("composer.pick")} onClick=${() => files.current.click()} />
            <${IconButton} icon="camera" label=${t("composer.camera")} onClick=${photograph} />
            <${IconButton} icon="sliders" label=${t("parameters")} aria-expanded=${settings} aria-controls="parameters" onClick=${() => store.set({ settings: !settings })} />
            <${ThinkingSwitch} />
            <span class="grow"></span>
            <span class="keys muted" aria-hidden="true">${t("composer.keys")}</span>
            ${running
              ? html`<button type="button" class="send stop" onClick=${() => stopAnswer(current.id)}><${Icon} name="stop" />${t("stop")}</button>`
              : html`<button type="button" class="send primary" disabled=${!can} onClick=${send}><${Icon} name="send" />${t(reading && asking ? "composer.reading" : "send")}</button>`}
          </div>
          <input ref=${files} class="pick" type="file" accept=${ACCEPT} multiple hidden onChange=${pick} />
          <input ref=${phone} type="file" accept=${ACCEPT} capture="environment" hidden onChange=${pick} />
        </div>
      </div>
      ${camera && html`<${Camera} onClose=${() => setCamera(false)} onPicture=${(file) => addFiles([file])} />`}
    </footer>
  `;
}

function ThinkingSwitch() {
  use((s) => s.session);
  const { thinking } = useParameters();
  const can = model()?.thinking;
  if (can === null || can === undefined || can === false) return null;
  const on = thinking ?? true;
  return html`<button type="button" class=${on ? "toggle on" : "toggle"} aria-pressed=${on} title=${t("thinking.switch")} onClick=${() => setParameters({ thinking: !on })}>
    <${Icon} name="thought" /><span>${t("thinking")}</span>
  </button>`;
}

function Refusal({ refusal, retry, can }) {
  return html`
    <div class="banner problem" role="alert">
      <p><strong>${t("refusal.title")}</strong> ${problemWords(refusal)}</p>
      ${(refusal.findings ?? []).slice(0, 1).map((one) => html`<p>${one.cause || one.title}</p>`)}
      <div class="row">
        <button type="button" disabled=${!can} onClick=${retry}><${Icon} name="again" />${t("retry")}</button>
        <button type="button" class="quiet" onClick=${() => store.set({ refusal: null })}>${t("close")}</button>
        <span class="muted small-text">${t("refusal.kept")}</span>
      </div>
    </div>
  `;
}

function Preview({ one }) {
  const [cropping, setCropping] = useState(false);
  const { prepared } = one;
  const changed = prepared && (prepared.width !== prepared.original_width || prepared.height !== prepared.original_height);
  return html`
    <li class=${`preview ${one.state}`}>
      ${one.url ? html`<img src=${one.url} alt=${one.name} />` : html`<span class="blank"><${Icon} name="picture" /></span>`}
      <div class="about">
        <p class="name" title=${one.name}>${one.name}</p>
        ${one.state === "reading" && html`<p class="muted">${t("picture.reading")}</p>`}
        ${one.state === "refused" && html`<p class="problem" role="alert">${one.words}</p>`}
        ${one.state === "ready" &&
        html`<p class="muted">
          ${changed
            ? t("picture.sent_as", { from: `${number(prepared.original_width)} × ${number(prepared.original_height)}`, to: `${number(prepared.width)} × ${number(prepared.height)}` })
            : `${number(prepared.width)} × ${number(prepared.height)}`}
        </p>
        <p class="muted">${prepared.tokens === null ? t("picture.tokens_unknown") : t("picture.tokens", { n: prepared.tokens })} · ${size(prepared.sent_bytes)}</p>`}
      </div>
      <div class="preview-tools">
        ${one.state === "ready" && html`<${IconButton} icon="crop" label=${t("crop.name", { name: one.name })} onClick=${() => setCropping(true)} />`}
        <${IconButton} icon="close" label=${t("picture.remove", { name: one.name })} onClick=${() => removePicture(one.id)} />
      </div>
      ${cropping && html`<${Crop} one=${one} onClose=${() => setCropping(false)} />`}
    </li>
  `;
}

/** Pictures dropped anywhere on the page go to the draft. */
export function DropTarget() {
  const [over, setOver] = useState(false);
  useEffect(() => {
    let depth = 0;
    const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    const enter = (event) => carries(event) && (event.preventDefault(), (depth += 1), setOver(true));
    const leave = (event) => carries(event) && ((depth -= 1), depth <= 0 && setOver(false));
    const move = (event) => carries(event) && event.preventDefault();
    const drop = (event) => {
      depth = 0;
      setOver(false);
      if (!carries(event)) return;
      event.preventDefault();
      addFiles([...event.dataTransfer.files]);
    };
    const pairs = { dragenter: enter, dragleave: leave, dragover: move, drop };
    for (const [name, listener] of Object.entries(pairs)) window.addEventListener(name, listener);
    return () => Object.entries(pairs).forEach(([name, listener]) => window.removeEventListener(name, listener));
  }, []);
  return over ? html`<div class="drop" aria-hidden="true"><p>${t("composer.drop")}</p></div>` : null;
}
