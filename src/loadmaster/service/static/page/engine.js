// The engine's state in words: what the dot says, and what helps.
import { seconds } from "./format.js";
import { known, t } from "./i18n.js";
import { use } from "./state.js";

const KINDS = {
  ready: "ok", answering: "ok",
  checking: "busy", "waiting-for-memory": "busy", loading: "busy", "warming-up": "busy", starting: "busy", stopping: "busy", stuck: "busy",
  restarting: "busy", backoff: "busy",
  exited: "down", failed: "down", stopped: "down", down: "down", crashed: "down",
};

/** {kind: "ok" | "busy" | "down" | "unknown", label, detail, finding}: what is known of the engine now. */
export function useEngine() {
  const engine = use((s) => s.engine);
  const connected = use((s) => s.connected);
  const offline = use((s) => s.offline);
  const problem = use((s) => s.problem);
  if (offline || problem?.code === "unreachable" || (connected === false && engine !== null)) {
    return { kind: "down", state: "away", label: t("engine.away"), detail: t("engine.away.help"), finding: null };
  }
  if (engine === null) return { kind: "unknown", state: null, label: t("engine.unknown"), detail: null, finding: null };
  const kind = KINDS[engine.state] ?? "unknown";
  const key = `engine.${engine.state}`;
  const label = known(key) ? t(key) : String(engine.state).replaceAll("-", " ");
  const parts = [];
  if (kind !== "ok" && engine.phase) parts.push(known(`phase.${engine.phase}`) ? t(`phase.${engine.phase}`) : engine.phase);
  if (kind === "busy" && engine.seconds != null) parts.push(t("engine.since", { time: seconds(Math.round(engine.seconds)) }));
  if (kind === "busy" && engine.left_s != null) parts.push(t("engine.left", { time: seconds(Math.round(engine.left_s)) }));
  return { kind, state: engine.state, label, detail: parts.join(" · ") || null, words: engine.words ?? engine.message ?? null, finding: engine.finding ?? null };
}
