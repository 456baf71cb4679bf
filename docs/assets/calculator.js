// Predicts steps from the table OPTIMIZERS, as `python -m sparse_collectives plan` does.

/** Rows of the planner's second table, the fastest first, and the optimizer to use. */
function predict({ size, workers, bandwidth, latency, compute, worker }) {
  const rows = OPTIMIZERS.rows.map((row) => {
    const [linear, root] = row.words[workers];
    const words = linear * size + root * Math.sqrt(size);
    const buckets = row.buckets ? Math.max(1, Math.ceil((row.buckets * size) / OPTIMIZERS.bucket)) : 1;
    const messages = row.messages[workers] * buckets;
    const exchange = messages * latency + (words * 32) / bandwidth;
    const hidden = Math.min((exchange * (buckets - 1)) / buckets, compute * OPTIMIZERS.backward);
    const local = row[worker][0] + row[worker][1] * size;
    return { ...row, bytes: 4 * words, exchange, local, step: compute + local + exchange - hidden };
  });
  rows.sort((one, other) => one.step - other.step);
  const dense = rows.find((row) => row.dense);
  const sparse = rows.find((row) => row.name === "sparse_adamw");
  const gain = dense.step / sparse.step;
  return { rows, dense, gain, chosen: gain < OPTIMIZERS.margin ? dense : sparse };
}

/** A number with three digits, and a unit of thousands. */
function short(number, unit, units) {
  const at = Math.max(0, Math.min(units.length - 1, Math.floor(Math.log10(number) / 3)));
  return `${Number((number / 1000 ** at).toPrecision(3))} ${units[at]}${unit}`;
}

function show(form, place) {
  const read = (name) => Number(form.elements[name].value);
  const given = {
    size: 1e6 * read("size"),
    workers: read("workers"),
    bandwidth: 1e6 * read("bandwidth"),
    latency: 1e-3 * read("latency"),
    compute: 1e-3 * read("compute"),
    worker: form.elements.worker.value,
  };
  if (!(given.size > 0 && given.size < 2 ** 31 && given.bandwidth > 0 && given.latency >= 0 && given.compute >= 0)) {
    place.textContent = "Parameters must be above 0 and below 2,147 million (one buffer), the bandwidth above 0, and times at least 0.";
    return;
  }
  const { rows, dense, gain, chosen } = predict(given);
  const cells = rows.map((row) =>
    `<tr><td>${row.name} (${row.codec})</td><td>${short(1e6 * row.step, "s", ["µ", "m", ""])}</td>` +
    `<td>${(dense.step / row.step).toPrecision(3)}</td><td>${short(row.bytes, "B", ["", "k", "M", "G"])}</td></tr>`);
  const said = chosen === dense
    ? `Use a dense optimizer: a step of sparse_adamw is ${gain.toPrecision(3)} times as fast.`
    : `Use sparse_adamw: its step is ${gain.toPrecision(3)} times as fast as dense AdamW.`;
  place.innerHTML = `<p><strong>${said}</strong></p><table><thead><tr><th>optimizer (messages)</th>` +
    `<th>step</th><th>times as fast as dense</th><th>received by a worker</th></tr></thead>` +
    `<tbody>${cells.join("")}</tbody></table>`;
}

if (typeof document !== "undefined") {
  const form = document.getElementById("calculator");
  if (form) {
    for (const count of OPTIMIZERS.workers) {
      form.elements.workers.add(new Option(count, count, count === 8, count === 8));
    }
    const place = document.getElementById("calculated");
    form.addEventListener("input", () => show(form, place));
    form.addEventListener("submit", (event) => event.preventDefault());
    show(form, place);
  }
}
