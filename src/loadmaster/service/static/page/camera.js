import { html, useEffect, useRef, useState } from "./html.js";
import { Dialog } from "./dialog.js";
import { t } from "./i18n.js";
import { Icon } from "./icons.js";

export const cameraHere = () => Boolean(navigator.mediaDevices?.getUserMedia);

export function Camera({ onClose, onPicture }) {
  const video = useRef(null);
  const [problem, setProblem] = useState(null);
  const [ready, setReady] = useState(false);
  useEffect(() => {
    let stream = null;
    let gone = false;
    const wanted = { video: { facingMode: "environment", width: { ideal: 1920 }, height: { ideal: 1080 } } };
    navigator.mediaDevices.getUserMedia(wanted).then(
      (got) => {
        stream = got;
        if (gone) stop();
        else video.current.srcObject = got;
      },
      (error) => setProblem(t(error.name === "NotAllowedError" ? "camera.refused" : "camera.none")),
    );
    const stop = () => stream?.getTracks().forEach((track) => track.stop());
    return () => {
      gone = true;
      stop();
    };
  }, []);
  const take = () => {
    const { videoWidth: width, videoHeight: height } = video.current;
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    canvas.getContext("2d").drawImage(video.current, 0, 0);
    canvas.toBlob((blob) => {
      onPicture(new File([blob], t("camera.file"), { type: "image/jpeg" }));
      onClose();
    }, "image/jpeg", 0.95);
  };
  return html`
    <${Dialog} title=${t("composer.camera")} wide=${true} onClose=${onClose}>
      ${problem
        ? html`<p class="problem" role="alert">${problem}</p>`
        : html`<video ref=${video} class="enlarged" autoplay playsinline muted onLoadedData=${() => setReady(true)}></video>`}
      <div class="row end">
        <button type="button" class="primary" disabled=${!ready} onClick=${take}><${Icon} name="camera" />${t("camera.take")}</button>
      </div>
    <//>
  `;
}
