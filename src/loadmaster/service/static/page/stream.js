// Server-sent events of a fetch answer. EventSource can neither POST nor be stopped with a reason.

/** Calls ``onEvent(name, data)`` for each event until the stream ends; data is parsed JSON. Lines end in \n alone. */
export async function readEvents(response, onEvent) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    let from = 0;
    let end;
    while ((end = rest.indexOf("\n\n", from)) !== -1) {
      deliver(rest.slice(from, end), onEvent);
      from = end + 2;
    }
    if (from > 0) rest = rest.slice(from);
  }
}

function deliver(block, onEvent) {
  let name = "message";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    else if (line.startsWith("data: ")) data += line.slice(6);
  }
  if (data !== "") onEvent(name, JSON.parse(data));
}
