import { t } from "./i18n.js";
import { notify } from "./state.js";

export async function copy(text) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "off-screen";
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
  }
  notify(done ? t("copied") : t("copy.failed"), done ? "note" : "problem");
}
