"use strict";
(() => {
  const $ = (selector, from = document) => from.querySelector(selector);
  const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
  const notes = JSON.parse($("#notes").textContent);
  const boards = $$(".board");

  // An element with text and children; text is never read as HTML.
  function make(tag, props = {}, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(props)) {
      if (key in element && key !== "list") element[key] = value;
      else element.setAttribute(key, value);
    }
    element.append(...children.filter((child) => child !== null));
    return element;
  }

  // ---- data blocks, read when first needed -------------------------------------------------
  const read = new WeakMap();
  function data(board, kind) {
    const block = $(`script.${kind}`, board);
    if (!block) return null;
    if (!read.has(block)) read.set(block, JSON.parse(block.textContent));
    return read.get(block);
  }

  // ---- sorting -----------------------------------------------------------------------------
  // Numbers as numbers, inf above all, what is missing always last.
  function sortKey(cell) {
    if (!("v" in cell.dataset)) return cell.textContent.trim().toLowerCase() || null;
    const value = cell.dataset.v;
    return value === "" ? null : value === "inf" ? Infinity : Number(value);
  }

  function sort(button) {
    const head = button.closest("th");
    const body = $("tbody", head.closest("table"));
    const column = [...head.parentNode.children].indexOf(head);
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of $$("[aria-sort]", head.parentNode)) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = $$("tr[data-i]", body).map((row) => [sortKey(row.children[column]), row]);
    const sign = down ? -1 : 1;
    rows.sort(([a, x], [b, y]) => {
      if (a === null || b === null) {
        if (a !== b) return a === null ? 1 : -1;
      } else if (a < b) return -sign;
      else if (a > b) return sign;
      return x.dataset.i - y.dataset.i;
    });
    for (const [, row] of rows) {
      const opened = row.nextElementSibling;
      body.append(row);
      if (opened && opened.classList.contains("detail")) body.append(opened);
    }
    shorten(button.closest(".board"));
  }

  // Of a long table the first rows are laid out, all of them when the reader asks for them.
  const atOnce = Number(document.body.dataset.atOnce);
  function shorten(board) {
    const all = board.classList.contains("whole");
    let shown = 0;
    for (const row of $$("tr[data-i]", board)) {
      if (!row.hidden) shown += 1;
      row.classList.toggle("more", !all && !row.hidden && shown > atOnce);
    }
    const rest = $(".rest", board);
    if (rest) rest.hidden = all || shown <= atOnce;
  }

  // ---- filters, kept in the address ----------------------------------------------------------
  const form = $(".filters");
  const texts = new WeakMap();
  let place = "";
  function text(row) {
    if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
    return texts.get(row);
  }

  function filter() {
    const wanted = Object.fromEntries(new FormData(form));
    const words = (wanted.q || "").toLowerCase().split(/\s+/).filter(Boolean);
    let rows = 0, tables = 0, all = 0;
    for (const board of boards) {
      const fits = ["protocol", "dataset", "model", "checkpoint"].every(
        (key) => !wanted[key] || board.dataset[key] === wanted[key]);
      let shown = 0;
      for (const row of $$("tr[data-i]", board)) {
        all += 1;
        const keep = fits && (!wanted.defense || row.dataset.d === wanted.defense)
          && !(wanted.useful && row.classList.contains("useless"))
          && words.every((word) => text(row).includes(word));
        row.hidden = !keep;
        const opened = row.nextElementSibling;
        if (opened && opened.classList.contains("detail")) opened.hidden = !keep;
        shown += keep;
      }
      shorten(board);
      board.hidden = !shown;
      const entry = $(`.contents [data-board="${board.id}"]`);
      if (entry) entry.hidden = !shown;
      rows += shown;
      tables += shown > 0;
    }
    const some = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
    $(".count").textContent = rows === all
      ? `${some(all, "row")} in ${some(tables, "table")}`
      : rows ? `${rows} of ${some(all, "row")}, in ${some(tables, "table")}`
      : `None of ${some(all, "row")} fits. Reset shows all again.`;
  }

  function address() {
    const kept = new URLSearchParams();
    for (const [key, value] of new FormData(form)) if (value) kept.set(key, value);
    if (place) kept.set("at", place);
    return kept.toString();
  }

  function remember() {
    const hash = address();
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  function restore() {
    const hash = location.hash.slice(1);
    if (hash && !hash.includes("=")) return; // a plain anchor
    const kept = new URLSearchParams(hash);
    for (const field of $$("[name]", form)) {
      const value = kept.get(field.name) || "";
      if (field.type === "checkbox") field.checked = value !== "";
      else field.value = value;
      if (field.value !== value && field.tagName === "SELECT") field.value = "";
    }
    place = kept.get("at") || "";
    filter();
    if (place) document.getElementById(place)?.scrollIntoView();
  }

  form.addEventListener("input", () => { filter(); remember(); });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => { place = ""; filter(); remember(); }));
  window.addEventListener("hashchange", restore);

  function go(link) {
    const target = document.getElementById(link.hash.slice(1));
    if (!target) return;
    place = target.id;
    target.scrollIntoView();
    $("h2", target)?.focus({ preventScroll: true });
    remember();
  }

  // ---- notes: what a column, flag or missing figure means --------------------------------------
  const note = $("#note");
  function explain(button, ...paragraphs) {
    note.replaceChildren(...paragraphs.filter(Boolean));
    if (note.matches(":popover-open")) note.hidePopover();
    note.showPopover();
    const from = button.getBoundingClientRect();
    const box = note.getBoundingClientRect();
    const below = from.bottom + 6 + box.height < innerHeight;
    note.style.left = `${Math.max(8, Math.min(from.left, innerWidth - box.width - 8))}px`;
    note.style.top = `${Math.max(8, below ? from.bottom + 6 : from.top - box.height - 6)}px`;
    note.from = button;
  }
  note.setAttribute("role", "status");
  addEventListener("scroll", () => note.matches(":popover-open") && note.hidePopover(), { passive: true });

  // ---- an opened row ---------------------------------------------------------------------------
  const names = {
    ssim: "SSIM", mse: "MSE", psnr: "PSNR", success: "SSIM > 0.9", leacc: "LeAcc", lnacc: "LnAcc",
    irec: "instance recall", label_accuracy: "label accuracy", attribute_accuracy: "attribute accuracy",
  };
  const round = (x) => typeof x !== "number" ? x : x !== 0 && (Math.abs(x) < 0.001 || Math.abs(x) >= 1e5)
    ? Number(x.toPrecision(3)).toExponential() : Number(x.toPrecision(4)).toString();
  const three = (x) => round(typeof x === "number" ? Number(x.toPrecision(3)) : x);

  function pairs(entries) {
    const list = make("dl", { className: "pairs" });
    for (const [name, value] of entries) {
      list.append(make("dt", { textContent: name }), make("dd", { textContent: value }));
    }
    return list;
  }

  function part(title, ...children) {
    return make("section", {}, make("h3", { textContent: title }), ...children);
  }

  function items(texts) {
    return make("ul", {}, ...texts.map((t) => make("li", { textContent: t })));
  }

  function audit(found) {
    if (!found) return "No audit was made.";
    const limit = found.eps_at_least ? ", limited by its draws" : "";
    return `An attack on one release certifies epsilon of at least ${round(found.eps_audited)}${limit} `
      + `(${found.draws} draws, ${100 * found.confidence} % confidence). Claim: ${found.verdict_claim}. `
      + `Proof: ${found.verdict_proof}.`;
  }

  function attackTable(row, pieces, metrics) {
    const used = metrics.filter((m) => Object.values(row.attacks).some((a) => a.metrics?.[m]));
    const head = ["attack", ...used.map((m) => names[m] || m), "victims", "budget", "seconds", "notes"];
    const table = make("table", {}, make("caption", { className: "hidden", textContent: "All figures of each attack" }),
      make("thead", {}, make("tr", {}, ...head.map((h) => make("th", { scope: "col", textContent: h })))));
    const body = table.createTBody();
    for (const [name, attack] of Object.entries(row.attacks)) {
      const line = body.insertRow();
      line.append(make("th", { scope: "row" }, name, make("small", { textContent: attack.threat })));
      const floor = pieces[attack.floor] || {};
      if (!attack.metrics) {
        const cell = line.insertCell();
        cell.colSpan = head.length - 1;
        cell.append(make("b", { className: attack.status === "not_applicable" ? "" : "bad",
          textContent: attack.status.replace("_", " ") }), `: ${pieces[attack.reason] || "no figure"}`);
        continue;
      }
      for (const metric of used) {
        const found = attack.metrics?.[metric];
        const cell = line.insertCell();
        if (!found) { cell.textContent = "–"; continue; }
        cell.append(round(found[0]), make("small", { textContent: `[${three(found[1])}, ${three(found[2])}]` }));
        if (metric in floor) {
          const given = floor[`${metric}_class_mean`];
          cell.append(make("small", { textContent: `floor ${three(floor[metric])}${given === undefined ? "" : `/${three(given)}`}` }));
        }
      }
      const victims = attack.n || attack.failed ? `${attack.n || 0}` : "–";
      line.insertCell().append(victims, attack.failed ? make("small", { className: "bad", textContent: `${attack.failed} failed` }) : "");
      const spent = line.insertCell();
      spent.append(attack.budget ? `${attack.budget}` : "–");
      if (attack.evaluations) spent.append(make("small", { textContent: `${attack.evaluations} evaluations` }));
      line.insertCell().textContent = attack.seconds === undefined ? "–" : round(attack.seconds);
      const words = line.insertCell();
      words.className = "words";
      if (attack.status !== "done") {
        words.append(make("b", { className: "bad", textContent: `${attack.status} for a seed: ` }), `${pieces[attack.reason]}; `);
      }
      const told = (attack.notes || []).map((n) => pieces[n]);
      const grown = attack.convergence;
      if (grown && attack.status === "done") {
        told.push(`${grown.converged ? "converged" : "cut short"}: twice the budget of ${grown.budget} `
          + `adds ${round(grown.gain)} SSIM where nothing defends`);
      }
      words.append(told.join("; "));
    }
    return make("div", { className: "box", tabIndex: 0, role: "region", ariaLabel: "Figures of each attack" }, table);
  }

  function content(board, index) {
    const { pieces, metrics, rows } = data(board, "details");
    const row = rows[index];
    const inner = make("div", { className: "inner" });
    const said = (places) => places.map((p) => pieces[p]);
    const settings = row.settings.length ? row.settings : [["settings", "none"]];
    const columns = make("div", { className: "columns" });
    columns.append(part("Epsilon",
      row.words.length ? items(said(row.words)) : make("p", { className: "dim", textContent: "These records hold no sentences on epsilon." }),
      row.reasons.length ? make("details", {}, make("summary", { textContent: "What leaves the client, piece by piece" }), items(said(row.reasons))) : null,
      make("p", { textContent: audit(row.audit) })));
    columns.append(part("Setting and cost", pairs([
      ...settings, ...(row.variant ? [["variant", row.variant]] : []), ["delta", round(row.delta)],
      ...row.costs, ["seeds", row.seeds.join(", ")], ...row.threat.map((t) => ["threat", pieces[t]])])));
    inner.append(columns);
    if (row.flags.length) {
      inner.append(part("Flags", items(row.flags.map((f) => pieces[f].filter(Boolean).join(". ")))));
    }
    if (Object.keys(row.attacks).length) inner.append(part("Attacks", attackTable(row, pieces, metrics)));
    const album = pictureList(board, index);
    if (album) inner.append(part("Pictures", album));
    inner.append(make("button", { type: "button", className: "close", textContent: "Close" }));
    return inner;
  }

  function toggle(button, open = button.getAttribute("aria-expanded") !== "true") {
    const row = button.closest("tr");
    const next = row.nextElementSibling;
    if (next && next.classList.contains("detail")) next.remove();
    button.setAttribute("aria-expanded", String(open));
    if (!open) return;
    const board = row.closest(".board");
    const cell = make("td", { colSpan: row.children.length }, content(board, Number(row.dataset.i)));
    const id = `${board.id}-row-${row.dataset.i}`;
    row.after(make("tr", { className: "detail", id }, cell));
    button.setAttribute("aria-controls", id);
  }

  // ---- pictures --------------------------------------------------------------------------------
  // Sprites are cut into one image per sample when they are first shown.
  const loaded = new Map();
  function tiles(sprite, count) {
    if (!loaded.has(sprite)) {
      loaded.set(sprite, new Promise((resolve, reject) => {
        const image = new Image();
        image.onload = () => {
          const width = image.naturalWidth / count;
          const canvas = make("canvas", { width, height: image.naturalHeight });
          const pen = canvas.getContext("2d");
          resolve(Array.from({ length: count }, (_, i) => {
            pen.drawImage(image, -i * width, 0);
            return canvas.toDataURL();
          }));
        };
        image.onerror = () => reject(new Error("a picture could not be read"));
        image.src = sprite;
      }));
    }
    return loaded.get(sprite);
  }

  const who = (i, samples) => `victim ${Math.floor(i / samples) + 1}${samples > 1 ? `, sample ${i % samples + 1}` : ""}`;
  const label = (metric) => metric === "ssim" ? "SSIM" : "MSE";
  const score = (cell, i) => `${label(cell.metric)} ${cell.metric === "ssim" ? cell.scores[i].toFixed(2) : round(cell.scores[i])}`;

  function strip(name, sprite, cell, alt, scores) {
    const line = make("tr", { className: scores ? "" : "truth" }, make("th", { scope: "row" }, ...[].concat(name)));
    const images = cell.scores.map((_, i) => {
      const image = make("img", { alt: alt(i) });
      const score_ = scores ? make("small", { textContent: score(cell, i) }) : null;
      line.append(make("td", {}, image, score_));
      return image;
    });
    tiles(sprite, cell.scores.length).then(
      (urls) => urls.forEach((url, i) => { images[i].src = url; }),
      (error) => { line.append(make("td", { textContent: error.message })); });
    return line;
  }

  function album(cells, samples, caption) {
    const table = make("table", {}, make("caption", { className: "hidden", textContent: caption }));
    const head = make("tr", {}, make("td"));
    for (let i = 0; i < samples.count; i += 1) head.append(make("th", { scope: "col", textContent: who(i, samples.each) }));
    table.append(make("thead", {}, head), make("tbody", {}, ...cells));
    return make("div", { className: "grid", tabIndex: 0, role: "region", ariaLabel: caption }, table);
  }

  function truthOf(pictures, cell, name = "Truth") {
    return strip(name, pictures.sprites[cell.truth], cell, (i) => `Truth, ${who(i, cell.samples)}`, false);
  }

  function rebuiltOf(pictures, cell, name) {
    return strip(name, pictures.sprites[cell.images], cell,
      (i) => `${cell.attack}, ${who(i, cell.samples)}, ${score(cell, i)}`, true);
  }

  function numbers(record) {
    const shown = record.truth[0].length;
    const table = make("table", {}, make("caption", { textContent:
      `First ${shown} of ${record.features} features, first ${record.truth.length} samples` }));
    const head = make("tr", {}, make("th", { scope: "col", textContent: "sample" }), make("th", { scope: "col", textContent: "" }));
    for (let i = 1; i <= shown; i += 1) head.append(make("th", { scope: "col", textContent: `x${i}` }));
    head.append(make("th", { scope: "col", textContent: "MSE of all" }));
    table.append(make("thead", {}, head));
    const body = table.createTBody();
    record.truth.forEach((truth, i) => {
      for (const [kind, values] of [["truth", truth], ["rebuilt", record.images[i]]]) {
        const line = body.insertRow();
        line.append(make("th", { scope: "row", textContent: kind === "truth" ? who(i, record.samples) : "" }));
        line.insertCell().textContent = kind;
        for (const value of values) line.insertCell().textContent = round(value);
        line.insertCell().textContent = kind === "truth" ? "" : round(record.scores[i]);
      }
    });
    return make("div", { className: "box", tabIndex: 0, role: "region", ariaLabel: "Records" }, table);
  }

  function pictureList(board, index) {
    const pictures = data(board, "pictures");
    if (!pictures) return null;
    const list = make("div", { className: "pictures" });
    const offer = (name, draw) => {
      const details = make("details", {}, make("summary", { textContent: name }));
      details.addEventListener("toggle", () => {
        if (details.open && details.children.length === 1) details.append(draw());
      });
      list.append(details);
    };
    for (const cell of pictures.cells.filter((c) => c.row === index)) {
      const victims = cell.scores.length / cell.samples;
      const first = `first ${victims === 1 ? "victim" : `${victims} victims`}`;
      offer(`${cell.attack}: ${first}`, () => album(
        [truthOf(pictures, cell), rebuiltOf(pictures, cell, cell.attack)],
        { count: cell.scores.length, each: cell.samples }, `Truth above ${cell.attack}, ${first}`));
    }
    for (const record of pictures.records.filter((r) => r.row === index)) {
      offer(`${record.attack}: records`, () => numbers(record));
    }
    return list.children.length ? list : null;
  }

  // All settings of a table for one attack; another truth is drawn where the victims are others.
  function compare(details) {
    const board = details.closest(".board");
    const pictures = data(board, "pictures");
    const attack = $(".attack", details).value;
    const cells = pictures.cells.filter((c) => c.attack === attack).sort((a, b) => a.row - b.row);
    const body = [];
    let truth = null;
    for (const cell of cells) {
      if (cell.truth !== truth) {
        body.push(truthOf(pictures, cell, truth === null ? "Truth" : "Truth (other victims)"));
        truth = cell.truth;
      }
      const row = $(`tr[data-i="${cell.row}"]`, board);
      const settings = $("th small", row);
      const rank = row.children[0].textContent;
      const name = [`${rank} `, make("b", { textContent: row.dataset.d }),
        make("small", { textContent: settings ? settings.textContent : "" })];
      body.push(rebuiltOf(pictures, cell, name));
    }
    const count = cells[0].scores.length;
    $(".grid", details).replaceWith(album(body, { count, each: cells[0].samples }, `${attack}: all settings of ${$("h2", details.closest(".board")).textContent}`));
  }

  // ---- events ----------------------------------------------------------------------------------
  document.addEventListener("click", (event) => {
    const target = event.target.closest?.("button, a");
    if (!target) return;
    if (target.matches(".sort")) sort(target);
    else if (target.matches(".open")) toggle(target);
    else if (target.matches(".all")) {
      const board = target.closest(".board");
      const next = $("tr.more .open", board);
      board.classList.add("whole");
      shorten(board);
      next.focus({ preventScroll: true });
    }
    else if (target.matches(".close")) {
      const button = $(".open", target.closest("tr").previousElementSibling);
      toggle(button, false);
      button.focus();
    } else if (target.matches(".what")) {
      explain(target, make("p", { textContent: notes.columns[target.dataset.note] }));
    } else if (target.matches(".why")) {
      explain(target, make("p", { textContent: notes.reasons[target.dataset.why] }));
    } else if (target.matches("button.chip")) {
      const { pieces, rows } = data(target.closest(".board"), "details");
      const flag = pieces[rows[target.closest("tr").dataset.i].flags[target.dataset.flag]];
      explain(target, make("p", { className: "full", textContent: flag[0] }),
        flag[1] ? make("p", { textContent: flag[1] }) : null);
    } else if (target.matches(".contents a")) {
      event.preventDefault();
      go(target);
    }
  });

  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (note.matches(":popover-open")) {
      note.hidePopover();
      note.from.focus();
      return;
    }
    const details = event.target.closest("details[open]");
    const opened = event.target.closest("tr.detail");
    if (details) {
      details.open = false;
      $("summary", details).focus();
    } else if (opened || event.target.matches('.open[aria-expanded="true"]')) {
      const button = opened ? $(".open", opened.previousElementSibling) : event.target;
      toggle(button, false);
      button.focus();
    }
  });

  document.addEventListener("change", (event) => {
    if (event.target.matches(".attack")) compare(event.target.closest(".compare"));
  });
  document.addEventListener("toggle", (event) => {
    if (event.target.matches?.(".compare") && event.target.open) compare(event.target);
  }, true);

  restore();
  if (!$(".count").textContent) filter();
})();
