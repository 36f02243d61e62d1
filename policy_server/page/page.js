import { drawBars, drawLines, drawScene, format } from "./charts.js";

const SECONDS = 60;
const RECENT = 10;
const $ = (id) => document.getElementById(id);

const state = { policies: [], chosen: null, detail: null, stats: [], socket: null };

async function ask(path, options = {}) {
  const key = sessionStorage.getItem("key");
  const headers = { ...(options.headers ?? {}), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { ...options, headers });
  const content = await response.json();
  if (response.status === 401) $("key-form").hidden = false;
  if (!response.ok) throw new Error(content.error?.message ?? response.statusText);
  $("key-form").hidden = true;
  return content;
}

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// Policies.

function successOf(training) {
  if (training.success_rate === null) return null;
  const where = training.environment ? ` in ${training.environment}` : "";
  return `${Math.round(training.success_rate * 100)} % of ${training.num_evaluation_episodes} episodes${where}`;
}

function card(policy) {
  const live = policy.state === "live";
  const badge = make("span", { className: live ? "badge" : "badge off", textContent: policy.state });
  const versions = live ? `version ${policy.version} of ${policy.versions.join(", ")}` : `versions ${policy.versions.join(", ")}`;
  const made = make("button", { className: "policy", type: "button" }, badge, make("strong", { textContent: policy.name }), make("small", { textContent: versions }));
  if (policy.canary) made.append(make("small", { textContent: `version ${policy.canary.version} gets ${Math.round(policy.canary.share * 100)} % of the sessions` }));
  for (const [version, reason] of Object.entries(policy.failures)) made.append(make("small", { className: "failed", textContent: `version ${version}: ${reason}` }));
  if (policy.name === state.chosen && state.detail?.manifest) {
    const { architecture, training, precision } = state.detail.manifest;
    const size = architecture.depth ? `${architecture.depth} layers, ${architecture.width} wide` : architecture.name;
    made.append(make("small", { textContent: `${size}, ${precision}, ${state.detail.serving.engine}` }));
    const success = successOf(training);
    if (success) made.append(make("small", { textContent: `success: ${success}` }));
  }
  made.setAttribute("aria-pressed", policy.name === state.chosen);
  made.addEventListener("click", () => choose(policy.name));
  return made;
}

async function loadPolicies() {
  const { policies } = await ask("v1/policies");
  const changed = JSON.stringify(policies) !== JSON.stringify(state.policies);
  state.policies = policies;
  const live = policies.filter((policy) => policy.state === "live");
  $("state").textContent = `${live.length} of ${policies.length} policies live`;
  const chosen = policies.find((policy) => policy.name === state.chosen);
  if (changed && (!chosen || chosen.version !== state.detail?.version)) await choose(chosen?.name ?? live[0]?.name ?? policies[0]?.name ?? null);
  else if (changed) showPolicies();
}

function showPolicies() {
  const focused = document.activeElement?.closest?.(".policy") !== null && document.activeElement !== document.body;
  $("policies").replaceChildren(...state.policies.map(card));
  if (state.policies.length === 0) $("policies").append(make("p", { className: "quiet", textContent: "No policies yet; they appear here when they do." }));
  if (focused) document.querySelector('.policy[aria-pressed="true"]')?.focus();
}

async function choose(name) {
  const other = state.chosen !== name;
  state.chosen = name;
  state.detail = name ? await ask(`v1/policies/${name}`) : null;
  showPolicies();
  $("try").hidden = !state.detail?.manifest;
  if (state.detail?.manifest && other) {
    showForm(state.detail.manifest);
    showEpisode(state.detail.manifest);
  }
  drawCharts();
}

// Charts: differences of what the server has counted since its start.

function seriesOf(name) {
  return state.stats.map(({ time, policies }) => {
    const found = policies.filter((entry) => entry.policy === name);
    const sum = (pick) => found.map(pick).reduce((one, other) => one.map((value, index) => value + other[index]));
    if (found.length === 0) return { time, total: null, batches: null };
    return { time, total: sum((entry) => entry.latency.total.counts), batches: sum((entry) => entry.batch_rows.counts) };
  });
}

function difference(later, earlier) {
  if (!later) return null;
  return later.map((value, index) => Math.max(0, value - (earlier?.[index] ?? 0)));
}

function percentile(counts, bounds, share) {
  const all = counts?.reduce((one, other) => one + other, 0) ?? 0;
  if (all === 0) return null;
  let before = 0;
  for (let index = 0; index < counts.length; index += 1) {
    if (before + counts[index] >= share * all) {
      const low = index === 0 ? 0 : bounds[index - 1];
      const high = bounds[index] ?? low * 1.5;
      return 1e3 * (low + ((share * all - before) / counts[index]) * (high - low));
    }
    before += counts[index];
  }
  return null;
}

function dot(color, name, value) {
  const mark = make("span", { className: "dot" });
  mark.style.background = `var(${color})`;
  return [mark, `${name} `, make("b", { textContent: value })];
}

function drawCharts() {
  const newest = state.stats.at(-1);
  if (!newest || !state.chosen) return;
  const series = seriesOf(state.chosen);
  const p50 = [], p99 = [], rates = [];
  for (let index = 1; index < series.length; index += 1) {
    const counts = difference(series[index].total, series[index - 1].total);
    const seconds = series[index].time - series[index - 1].time;
    p50.push(percentile(counts, newest.time_buckets_s, 0.5));
    p99.push(percentile(counts, newest.time_buckets_s, 0.99));
    rates.push(counts ? counts.reduce((one, other) => one + other, 0) / seconds : 0);
  }
  const padded = (values) => [...Array(Math.max(0, SECONDS - values.length)).fill(null), ...values];
  drawLines($("latency"), [{ color: "--second", values: padded(p99) }, { color: "--first", values: padded(p50) }]);
  $("latency-legend").replaceChildren(...dot("--first", "p50", format(p50.at(-1))), ...dot("--second", "p99", format(p99.at(-1))));
  drawLines($("rate"), [{ color: "--first", values: padded(rates) }]);
  $("rate-legend").replaceChildren(...dot("--first", "now", format(rates.at(-1))));
  const recent = difference(series.at(-1).batches, series.at(-1 - Math.min(RECENT, series.length - 1)).batches) ?? [];
  const all = recent.reduce((one, other) => one + other, 0);
  const last = Math.max(6, recent.findLastIndex((count) => count > 0));
  const names = newest.batch_buckets.map((bound, index, bounds) => (index === 0 || bounds[index - 1] + 1 === bound ? `${bound}` : `–${bound}`));
  drawBars($("batches"), names.slice(0, last + 1).map((name, index) => ({ name, share: all ? recent[index] / all : 0 })));
  $("batches-legend").textContent = all ? `${format(all)} batches` : "no batches";
}

async function poll() {
  try {
    state.stats.push(await ask("v1/stats"));
    state.stats.splice(0, state.stats.length - SECONDS - 1);
    await loadPolicies();
    drawCharts();
    document.body.dataset.ready = "true";
  } catch (error) {
    $("state").textContent = `no connection to the server (${error.message})`;
  }
  setTimeout(poll, 1000);
}

// The form.

function nested(shape, value) {
  return shape.length === 0 ? value : Array.from({ length: shape[0] }, () => nested(shape.slice(1), value));
}

function exampleOf(field) {
  const known = { observation: [1.34, 0.75, 0.53, 0, 0, 0, 0, 0, 0, 0], desired_goal: [1.4, 0.7, 0.5] }[field.name];
  return known && field.shape.length === 1 && field.shape[0] === known.length ? known : nested(field.shape, 0);
}

function showForm(manifest) {
  $("answer").replaceChildren();
  const rows = (field) => Math.min(6, 1 + Math.floor(JSON.stringify(exampleOf(field)).length / 60));
  $("fields").replaceChildren(
    ...manifest.observation.map((field) => {
      const area = make("textarea", { name: field.name, rows: rows(field), value: JSON.stringify(exampleOf(field)), spellcheck: false });
      return make("label", {}, `${field.name} `, make("span", { className: "unit", textContent: `${field.dtype} [${field.shape.join(", ")}]` }), area);
    }),
  );
  const drawn = manifest.outputs === "distribution";
  $("draw-label").hidden = $("seed").hidden = !drawn;
  if (!drawn) $("draw").checked = false;
}

function readForm() {
  const observation = {};
  for (const area of $("fields").querySelectorAll("textarea")) {
    try {
      observation[area.name] = JSON.parse(area.value);
    } catch {
      throw new Error(`${area.name}: numbers in brackets are expected, such as [0, 0.5]`);
    }
  }
  const drawn = $("draw").checked ? { deterministic: false, seed: Number($("seed").value) } : {};
  return { observation, ...drawn };
}

function showAction(action, space) {
  const flat = [action].flat(Infinity);
  const low = space.low ?? [], high = space.high ?? [];
  return flat.map((value, index) => {
    const row = make("div", { className: "bar" }, make("span", { textContent: index }), make("span"), make("span", { textContent: format(value) }));
    const from = low[index], to = high[index];
    if (from !== null && from !== undefined && to !== null && to !== undefined && to > from) {
      const zero = Math.min(Math.max((0 - from) / (to - from), 0), 1);
      const at = (value - from) / (to - from);
      const bar = make("i");
      bar.style.left = `${Math.min(zero, at) * 100}%`;
      bar.style.width = `${Math.max(Math.abs(at - zero) * 100, 0.8)}%`;
      row.children[1].append(bar);
    }
    return row;
  });
}

$("act-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  try {
    const body = JSON.stringify(readForm());
    const headers = { "Content-Type": "application/json" };
    const answer = await ask(`v1/policies/${state.chosen}/act`, { method: "POST", body, headers });
    const { queue_ms, inference_ms, total_ms } = answer.timing;
    const timing = `version ${answer.version}; ${format(total_ms)} ms in all, ${format(inference_ms)} ms in the engine, ${format(queue_ms)} ms waiting`;
    $("answer").replaceChildren(...showAction(answer.action, state.detail.manifest.action), make("small", { className: "quiet", textContent: timing }));
  } catch (error) {
    $("answer").replaceChildren(make("span", { className: "error", textContent: error.message }));
  }
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", $("key").value);
});

// The episode.

function showEpisode(manifest) {
  state.socket?.close();
  const { environment } = manifest.training;
  $("episode-panel").hidden = !environment;
  $("episode-text").textContent = environment ? `${environment}, at its own pace; every action is asked of this server over HTTP.` : "";
  $("episode-state").textContent = "";
  $("frame").hidden = $("scene").hidden = true;
}

$("episode").addEventListener("click", () => {
  const key = sessionStorage.getItem("key");
  const address = new URL(`v1/policies/${state.chosen}/episode`, location.href);
  address.protocol = address.protocol.replace("http", "ws");
  address.searchParams.set("seed", Math.floor(Math.random() * 1e6));
  const socket = new WebSocket(address, key ? [`api-key.${key}`] : []);
  const path = [];
  state.socket?.close();
  state.socket = socket;
  $("episode").disabled = true;
  $("episode-state").className = "";
  $("episode-state").textContent = "starting the simulator…";
  let ended = false;
  socket.addEventListener("message", ({ data }) => {
    const step = JSON.parse(data);
    if (step.error) {
      ended = true;
      $("episode-state").className = "error";
      $("episode-state").textContent = step.error;
      return;
    }
    path.push(step.achieved_goal);
    $("frame").hidden = !step.frame;
    $("scene").hidden = Boolean(step.frame);
    if (step.frame) $("frame").src = `data:image/jpeg;base64,${step.frame}`;
    else drawScene($("scene"), path, step.desired_goal);
    const far = Math.hypot(...step.achieved_goal.map((value, index) => value - step.desired_goal[index]));
    const verdict = step.done ? (step.success ? "success: " : "failed: ") : "";
    ended = step.done;
    $("episode-state").textContent = `${verdict}step ${step.step}, ${format(far * 100)} cm from the goal, ${format(step.latency_ms)} ms an action`;
    if (step.done) $("episode-state").dataset.success = step.success;
  });
  socket.addEventListener("close", () => {
    if (state.socket === socket) $("episode").disabled = false;
    if (!ended && state.socket === socket) $("episode-state").textContent = "the episode was broken off";
  });
});

addEventListener("resize", drawCharts);
poll();
