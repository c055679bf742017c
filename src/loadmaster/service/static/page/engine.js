// The engine's state in words: what the dot says, and what helps.
import { useEffect, useState } from "./html.js";
import { seconds } from "./format.js";
import { known, t } from "./i18n.js";
import { use } from "./state.js";

const KINDS = {
  ready: "ok", answering: "ok",
  checking: "busy", "waiting-for-memory": "busy", loading: "busy", "warming-up": "busy", starting: "busy", stopping: "busy", stuck: "busy",
  unreachable: "busy",
  exited: "down", failed: "down", down: "down",
};

export function useEngine() {
  const engine = use((s) => s.engine);
  const connected = use((s) => s.connected);
  const offline = use((s) => s.offline);
  const problem = use((s) => s.problem);
  const [, tick] = useState(0);
  const counting = engine !== null && KINDS[engine.state] !== "ok";
  useEffect(() => {
    if (!counting) return;
    const timer = setInterval(() => tick((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [counting]);
  if (offline || problem?.code === "unreachable" || (connected === false && engine !== null)) {
    return { kind: "down", state: "away", label: t("engine.away"), detail: t("engine.away.help"), finding: null };
  }
  if (engine === null) return { kind: "unknown", state: null, label: t("engine.unknown"), detail: null, finding: null };
  const kind = KINDS[engine.state] ?? "unknown";
  const key = `engine.${engine.state}`;
  const label = known(key) ? t(key) : String(engine.state).replaceAll("-", " ");
  const parts = [];
  if (kind !== "ok" && engine.phase) parts.push(known(`phase.${engine.phase}`) ? t(`phase.${engine.phase}`) : engine.phase);
  const now = Date.now() / 1000;
  if (kind === "busy" && engine.seconds != null) parts.push(t("engine.since", { time: seconds(Math.max(0, Math.floor(engine.seconds + now - engine.at))) }));
  if (engine.left_s != null) parts.push(t("engine.left", { time: seconds(Math.max(0, Math.round(engine.left_s - (now - engine.at)))) }));
  if (kind !== "ok" && engine.retry_at != null && engine.retry_at > now) parts.push(t("engine.retry", { time: seconds(Math.ceil(engine.retry_at - now)) }));
  return { kind, state: engine.state, label, detail: parts.join(" · ") || null, words: engine.words ?? null, finding: engine.finding ?? null };
}
