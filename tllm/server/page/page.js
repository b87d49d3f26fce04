// The page of a server: what it does now, two answers side by side, and captured rows.
// Text from the server is set as text, never as HTML.

const $ = (id) => document.getElementById(id);
const LOOK_MS = 2000;
const KEPT = 60; // looks: two minutes

// -- the server -----------------------------------------------------------------------------------

for (const id of ["api-key", "admin-key"]) {
  $(id).value = sessionStorage.getItem(id) ?? "";
  $(id).addEventListener("change", () => {
    sessionStorage.setItem(id, $(id).value);
    begin();
  });
}

function headers() {
  const given = { "Content-Type": "application/json" };
  if ($("api-key").value) given.Authorization = `Bearer ${$("api-key").value}`;
  if ($("admin-key").value) given["X-Admin-Api-Key"] = $("admin-key").value;
  return given;
}

// The body of an answer; an Error with the server's own words when it refuses.
async function ask(path, body, signal) {
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path, { method, headers: headers(), body: JSON.stringify(body), signal });
  if (answer.ok) return answer;
  const text = await answer.text();
  let told = text;
  try {
    const error = JSON.parse(text);
    told = error.error?.message ?? error.detail ?? error.error ?? text;
  } catch { /* it is not JSON: the text says it */ }
  throw new Error(`${answer.status}: ${typeof told === "string" ? told : JSON.stringify(told)}`);
}

const json = async (path, body, signal) => (await ask(path, body, signal)).json();

// The events of a streamed answer.
async function* events(path, body, signal) {
  const answer = await ask(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message ?? String(event.error));
      yield event;
    }
  }
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return Object.assign(made, attributes);
}

const short = (x) => (Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : +x.toPrecision(3));

// Red below, white in the middle, blue above.
function shade(value, low, high) {
  const middle = (low + high) / 2;
  const far = high > low ? Math.min(1, Math.abs(value - middle) / ((high - low) / 2)) : 0;
  return `hsl(${value < middle ? 10 : 215} 80% ${100 - 25 * far}%)`;
}

// -- now ------------------------------------------------------------------------------------------

const looks = []; // {time, of: {metric: sum over its labels}}

function metrics(text) {
  const of = {};
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$/.exec(line);
    if (found) of[found[1]] = (of[found[1]] ?? 0) + Number(found[3]);
  }
  return of;
}

// What a metric grew by between two looks; 0 when the server began anew.
function growth(before, now, name) {
  return Math.max(0, (now.of[name] ?? 0) - (before.of[name] ?? 0));
}

function mean(before, now, name, unit) {
  const count = growth(before, now, `${name}_count`);
  return count ? `${short((1000 * growth(before, now, `${name}_sum`)) / count)} ${unit}` : "–";
}

async function look() {
  const now = { time: performance.now(), of: metrics(await (await ask("metrics")).text()) };
  looks.push(now);
  if (looks.length > KEPT + 1) looks.shift();
  const before = looks[Math.max(0, looks.length - 6)]; // over ten seconds
  const seconds = (now.time - before.time) / 1000 || 1;
  const rate = (name) => short(growth(before, now, name) / seconds);
  const have = (name) => short(now.of[name] ?? 0);
  const figures = [
    ["Generated", `${rate("vllm:generation_tokens_total")} tokens/s`],
    ["Prompts", `${rate("vllm:prompt_tokens_total")} tokens/s`],
    ["First token", mean(before, now, "vllm:time_to_first_token_seconds", "ms")],
    ["Each token", mean(before, now, "vllm:inter_token_latency_seconds", "ms")],
    ["Running", have("vllm:num_requests_running")],
    ["Waiting", have("vllm:num_requests_waiting")],
    ["Captured", `${rate("tllm:rows_captured_total")} rows/s`],
    ["Steered", `${rate("tllm:rows_steered_total")} rows/s`],
    ["Dropped", `${have("tllm:rows_dropped_total")} rows`],
  ];
  $("figures").replaceChildren(...figures.map(([name, value]) => {
    const made = element("div");
    made.append(element("dt", name), element("dd", value));
    return made;
  }));
  const rates = looks.slice(1).map((each, i) =>
    growth(looks[i], each, "vllm:generation_tokens_total") / ((each.time - looks[i].time) / 1000));
  const top = Math.max(1, ...rates);
  const points = rates.map((r, i) => `${300 - 5 * (rates.length - 1 - i)},${58 - (54 * r) / top}`);
  document.querySelector("#rate polyline").setAttribute("points", points.join(" "));
}

// -- what steers, and consumers -------------------------------------------------------------------

// "post_block 2, 3": where the entries of a tier act.
function places(described) {
  const found = {};
  for (const hooks of Object.values(described)) {
    for (const [hook, layers] of Object.entries(hooks)) {
      (found[hook] ??= new Set());
      Object.keys(layers).forEach((layer) => found[hook].add(layer === "null" ? "" : layer));
    }
  }
  const written = Object.entries(found).map(([hook, layers]) => `${hook} ${[...layers].join(", ")}`);
  return written.join("; ") || "nothing";
}

function options(select, names, first) {
  const chosen = select.value;
  select.replaceChildren(...first.map(([value, text]) => element("option", text, { value })),
    ...names.map((name) => element("option", name, { value: name })));
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

async function administer() {
  const [status, modules, workers] = await Promise.all([
    json("v1/steering"), json("v1/steering/modules"), json("v1/interventions")]);
  $("global").textContent = `Every request: ${places(status.global)}. `
    + `Vectors on the device: ${status.vectors_on_device}. Steered requests: ${status.requests}. `;
  if (places(status.global) !== "nothing") {
    $("global").append(button("clear", () => json("v1/steering/clear", {})));
  }
  $("modules").replaceChildren(...Object.entries(modules).map(([name, described]) => {
    const row = element("tr");
    row.append(element("td", name), element("td", places(described)), element("td"));
    row.lastChild.append(
      button("remove", () => json("v1/steering/modules/unregister", { name })));
    return row;
  }));
  options(document.forms.compare.module, Object.keys(modules), [["", "none"]]);
  const scored = new Set();
  $("consumers").replaceChildren(...workers.flatMap((worker, index) =>
    Object.entries(worker.by_consumer).map(([name, of]) => {
      if (name.startsWith("probe")) scored.add(name);
      const row = element("tr");
      row.append(...[index, name, of.rows, of.rows_dropped, of.waiting,
        `${short(of.lag_s ?? 0)} s`, of.error ?? ""].map((value) => element("td", value ?? "–")));
      return row;
    })));
  options(document.forms.compare.colour, [...scored], [["logprob", "log-probability"]]);
}

function button(text, action) {
  const made = element("button", text, { type: "button" });
  made.addEventListener("click", () => told(async () => { await action(); await administer(); }));
  return made;
}

// -- two answers ----------------------------------------------------------------------------------

// One answer, token by token, coloured as scores come.
class Answer {
  constructor(place, colour) {
    this.place = place;
    this.colour = colour;
    this.spans = [];
    this.scores = [];
    this.before = 0; // tokens of the prompt
    place.replaceChildren();
  }

  add(event) {
    const [choice] = event.choices;
    if (!choice) return;
    if (choice.prompt_token_ids) this.before = choice.prompt_token_ids.length;
    const { tokens = [], token_logprobs = [] } = choice.logprobs ?? {};
    tokens.forEach((token, i) => {
      const span = element("span", token);
      this.place.append(span);
      this.spans.push(span);
      if (this.colour === "logprob") this.scores[this.spans.length - 1] = token_logprobs[i];
    });
    const scored = choice.consumer_results?.[this.colour];
    scored?.positions.forEach((position, i) => {
      if (position >= this.before) this.scores[position - this.before] = scored.values[i];
    });
  }

  paint(low, high) {
    this.spans.forEach((span, i) => {
      if (this.scores[i] === undefined) return;
      span.style.background = shade(this.scores[i], low, high);
      span.title = `${this.colour}: ${short(this.scores[i])}`;
    });
  }

  refuse(error) {
    this.place.append(element("span", error.message, { className: "refused" }));
  }
}

let running = new AbortController();

async function compare(form) {
  running.abort();
  running = new AbortController();
  const { signal } = running;
  const colour = form.colour.value;
  const body = {
    model: $("model").textContent, prompt: form.prompt.value, stream: true, logprobs: 1,
    max_tokens: form.tokens.valueAsNumber, temperature: form.temperature.valueAsNumber,
    seed: form.seed.valueAsNumber, return_token_ids: true,
  };
  if (colour !== "logprob") body.consumers = { [colour]: {} };
  const steering = form.module.value
    ? { steering_name: [form.module.value, form.strength.valueAsNumber] } : {};
  const answers = [new Answer($("plain"), colour), new Answer($("steered"), colour)];
  const paint = () => {
    const scores = answers.flatMap((answer) => answer.scores).filter((s) => s !== undefined);
    if (!scores.length) return;
    const [low, high] = [Math.min(...scores), Math.max(...scores)];
    answers.forEach((answer) => answer.paint(low, high));
    $("scale").hidden = false;
    $("lowest").textContent = short(low);
    $("highest").textContent = short(high);
  };
  await Promise.all(answers.map(async (answer, i) => {
    try {
      for await (const event of events("v1/completions", i ? { ...body, ...steering } : body, signal)) {
        answer.add(event);
        paint();
      }
    } catch (error) {
      if (!signal.aborted) answer.refuse(error);
    }
  }));
}

// -- captured rows --------------------------------------------------------------------------------

const READ = {
  F32: (view, i) => view.getFloat32(4 * i, true),
  F16: (view, i) => half(view.getUint16(2 * i, true)),
  BF16: (view, i) => bits(view.getUint16(2 * i, true) << 16),
  I32: (view, i) => view.getInt32(4 * i, true),
  I64: (view, i) => Number(view.getBigInt64(8 * i, true)),
};
const DTYPES = { float32: "F32", float16: "F16", bfloat16: "BF16", int32: "I32", int64: "I64" };

function bits(number) {
  const view = new DataView(new ArrayBuffer(4));
  view.setUint32(0, number >>> 0);
  return view.getFloat32(0);
}

function half(number) {
  const sign = number & 0x8000 ? -1 : 1;
  const exponent = (number >> 10) & 31;
  const fraction = number & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

function tensor(dtype, shape, view) {
  const read = READ[dtype];
  if (!read) throw new Error(`rows of ${dtype} cannot be shown; download them`);
  const size = shape.reduce((a, b) => a * b, 1);
  return { shape, values: Float64Array.from({ length: size }, (_, i) => read(view, i)) };
}

function inline({ dtype, shape, data }) {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  return tensor(DTYPES[dtype], shape, new DataView(bytes.buffer));
}

// {name: tensor} of a safetensors file.
async function fetched(url) {
  const file = await (await ask(url.replace(/^\//, ""))).arrayBuffer();
  const length = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
  delete header.__metadata__;
  return Object.fromEntries(Object.entries(header).map(([name, of]) => {
    const [start, end] = of.data_offsets;
    return [name, tensor(of.dtype, of.shape, new DataView(file, 8 + length + start, end - start))];
  }));
}

function layersOf(text) {
  if (text.trim() === "all") return "all";
  return text.split(",").map((each) => Number(each.trim()));
}

async function capture(form) {
  $("download").hidden = true;
  $("row").textContent = "";
  const hook = form.hook.value;
  const hooks = { [hook]: hook === "lm_head_in" ? null : layersOf(form.layers.value) };
  const answer = await json("v1/completions", {
    model: $("model").textContent, prompt: form.prompt.value, temperature: 0, echo: true,
    logprobs: 1, max_tokens: form.tokens.valueAsNumber,
    capture: { memory: { hooks, positions: "all" } },
  });
  const [choice] = answer.choices;
  const result = choice.capture_results.memory;
  if (result.status !== "ok") throw new Error(`${result.status}: ${result.error}`);
  const rows = {};
  if (result.payload.url) {
    for (const [name, found] of Object.entries(await fetched(result.payload.url))) {
      const [, layer, what] = name.split(".");
      if (what === "tensor") rows[layer] = found;
    }
    Object.assign($("download"), {
      hidden: false, href: result.payload.url.replace(/^\//, ""), download: "rows.safetensors" });
  } else {
    for (const [layer, of] of Object.entries(result.payload[hook])) rows[layer] = inline(of.tensor);
  }
  show(rows, choice.logprobs.tokens, form.show.value);
}

const rowOf = ({ shape: [, width], values }, token) =>
  values.subarray(token * width, (token + 1) * width);
const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

// White for the smallest, blue for the largest; norms grow by factors from layer to layer.
function depth(value, low, high) {
  const far = high > low ? Math.log(value / low) / Math.log(high / low) : 0;
  return `hsl(215 80% ${100 - 30 * far}%)`;
}

// A table: a row a layer, a column a token.
function show(rows, tokens, what) {
  const layers = Object.keys(rows).sort((a, b) => a - b);
  const count = rows[layers[0]].shape[0];
  const value = (at, token) => {
    const row = rowOf(rows[layers[at]], token);
    const norm = Math.sqrt(dot(row, row));
    if (what === "norm") return norm;
    if (!at) return undefined;
    const before = rowOf(rows[layers[at - 1]], token);
    return dot(row, before) / (norm * Math.sqrt(dot(before, before)));
  };
  const values = layers.map((_, at) => Array.from({ length: count }, (_, token) => value(at, token)));
  const known = values.flat().filter((x) => x !== undefined);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const table = element("table", undefined, { className: "heat" });
  const head = element("tr");
  head.append(element("th"), ...tokens.slice(0, count).map((token) => element("th", token)));
  table.append(head);
  layers.forEach((layer, at) => {
    const line = element("tr");
    line.append(element("th", layer === "None" ? "" : layer));
    values[at].forEach((x, token) => {
      const cell = element("td", x === undefined ? "" : short(x));
      if (x !== undefined) cell.style.background = (what === "norm" ? depth : shade)(x, low, high);
      cell.addEventListener("click", () => {
        const row = rowOf(rows[layer], token);
        const largest = [...row.keys()].sort((a, b) => Math.abs(row[b]) - Math.abs(row[a]));
        $("row").textContent = `Layer ${layer}, token ${token} (${JSON.stringify(tokens[token])}), `
          + `largest of ${row.length}: `
          + largest.slice(0, 8).map((i) => `[${i}] ${short(row[i])}`).join(", ");
      });
      line.append(cell);
    });
    table.append(line);
  });
  $("rows").replaceChildren(table);
}

// -- the page -------------------------------------------------------------------------------------

// Do something, and show why it failed.
async function told(action) {
  try {
    await action();
    $("problem").textContent = "";
  } catch (error) {
    $("problem").textContent = error.message;
  }
}

function onSubmit(id, action) {
  document.forms[id].addEventListener("submit", (event) => {
    event.preventDefault();
    told(() => action(document.forms[id]));
  });
}

onSubmit("compare", (form) => { remember(form); return compare(form); });
onSubmit("capture", capture);
$("stop").addEventListener("click", () => running.abort());
document.forms.compare.strength.addEventListener("input", (event) => {
  $("shown").textContent = event.target.value;
});

// The fields of a comparison are in the address, so that it can be sent to somebody.
function remember(form) {
  history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
}

function recall(form) {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of given) if (form.elements[name]) form.elements[name].value = value;
  $("shown").textContent = form.strength.value;
  return given.has("prompt");
}

async function begin() {
  await told(async () => {
    const { data } = await json("v1/models");
    $("model").textContent = data[0].id;
    await administer();
    const points = await json("v1/steering/layers");
    options(document.forms.capture.hook, points.hook_points, []);
    if (points.hook_points.includes("post_block")) document.forms.capture.hook.value = "post_block";
    if (recall(document.forms.compare)) await compare(document.forms.compare);
  });
}

await begin();
for (;;) {
  if (!document.hidden) await look().catch((error) => { $("problem").textContent = error.message; });
  await new Promise((wake) => setTimeout(wake, LOOK_MS));
}
