"use strict";
(() => {
  const $ = (selector, from = document) => from.querySelector(selector);
  const $$ = (selector, from = document) => [...from.querySelectorAll(selector)];
  const notes = JSON.parse($("#notes").textContent);
  const body = $("#board tbody");
  if (!body) return;

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
  let album;
  function readAlbum() {
    album ??= JSON.parse($("#album")?.textContent || '{"sprites": [], "cells": [], "records": []}');
    return album;
  }

  let details;
  function readDetails() {
    details ??= (async () => {
      const bytes = Uint8Array.from(atob($("#details").textContent), (c) => c.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      return new Response(stream).json();
    })();
    return details;
  }

  // ---- the table ------------------------------------------------------------------------------
  // What the table library takes out of the document is read before.
  const heads = $$("#board thead th").map((head) => ({
    key: head.dataset.key, text: head.className === "text",
    title: [...head.childNodes].filter((n) => n.className !== "what").map((n) => n.textContent).join("").trim(),
    from: "from" in head.dataset ? Number(head.dataset.from) : Infinity,
  }));
  const rows = $$("tr", body);
  const rowNames = rows.map((row) => ({ defense: row.dataset.defense, settings: $("th small", row)?.textContent || "" }));
  // A phone has no room for the tasks' column: there each stands below its defense.
  const task = heads.findIndex((h) => h.key === "task");
  for (const row of rows) {
    const parts = [...row.children[task].children].map((part) => part.textContent);
    row.children[0].append(make("small", { className: "narrow", textContent: parts.join(" · ") }));
  }
  const places = (wanted) => heads.map((_, i) => i).filter((i) => wanted(heads[i]));
  const atFirst = () => heads.filter((h) => h.from <= innerWidth).map((h) => h.key);

  // Numbers as numbers, inf above all, what is missing always last.
  const number = (text) => text === "" ? null : text === "inf" ? Infinity : Number(text);
  const compareFigures = (sign) => (x, y) => {
    const [a, b] = [number(x), number(y)];
    if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
    return a === b ? 0 : a < b ? -sign : sign;
  };
  DataTable.ext.type.order["figure-asc"] = compareFigures(1);
  DataTable.ext.type.order["figure-desc"] = compareFigures(-1);
  const table = new DataTable("#board", {
    order: [], orderDescReverse: false, autoWidth: false, pageLength: 50, lengthMenu: [25, 50, 100, { label: "all", value: -1 }],
    columnDefs: [
      { targets: "_all", orderSequence: ["asc", "desc"] },
      { targets: places((h) => !h.text), type: "figure" },
      { targets: places((h) => h.from > innerWidth), visible: false },
    ],
    language: { lengthMenu: "rows on a page: _MENU_", emptyTable: "No rows.", zeroRecords: "No row fits. Reset shows all again.",
      aria: { paginate: { first: "First page", last: "Last page", next: "Next page", previous: "Previous page" } } },
    layout: { topStart: null, topEnd: null, bottomStart: "pageLength", bottomEnd: "paging" },
  });

  document.documentElement.classList.add("ready"); // only now is the table laid out

  // ---- filters, columns, order and the opened row, kept in the address -------------------------
  const form = $(".filters");
  let chosen = null; // columns, once the reader has chosen some
  let place = "";
  let wanted = {};
  table.search.fixed("filters", (_, __, index) => {
    const { dataset, classList } = rows[index];
    if (wanted.useful && classList.contains("useless")) return false;
    return Object.entries(wanted).every(([key, value]) =>
      !value || !(key in dataset) || dataset[key].split("|").includes(value));
  });

  function filter() {
    wanted = Object.fromEntries(new FormData(form));
    table.search(wanted.q || "").draw();
  }

  table.on("draw", () => {
    const { recordsDisplay, recordsTotal } = table.page.info();
    const all = `${recordsTotal} row${recordsTotal === 1 ? "" : "s"}`;
    $(".count").textContent = recordsDisplay === recordsTotal ? all : `${recordsDisplay} of ${all}`;
    remember();
  });

  let restoring = true;
  function remember() {
    if (restoring) return;
    const kept = new URLSearchParams();
    for (const [key, value] of new FormData(form)) if (value && key !== "column") kept.set(key, value);
    const order = table.order().filter(([, direction]) => direction);
    if (order.length) kept.set("sort", order.map(([i, d]) => `${d === "desc" ? "-" : ""}${heads[i].key}`).join(","));
    if (chosen) kept.set("columns", chosen.join(","));
    if (place) kept.set("row", place);
    const hash = kept.toString();
    if (hash || location.hash.includes("=")) {
      history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
    }
  }

  function showColumns(keys) {
    heads.forEach(({ key }, i) => {
      table.column(i).visible(keys.includes(key), false);
      $$("input", $(".choices"))[i].checked = keys.includes(key);
    });
  }

  function goTo(id) {
    const row = rows.find((r) => r.id === `row=${id}`);
    if (!row) return;
    const order = table.rows({ search: "applied", order: "applied" }).indexes().toArray();
    const at = order.indexOf(rows.indexOf(row));
    if (at < 0) return;
    if (table.page.len() > 0) table.page(Math.floor(at / table.page.len())).draw("page");
    for (const other of $$(".target", body)) other.classList.remove("target");
    row.classList.add("target");
    const box = row.closest(".scroll");
    box.scrollIntoView();
    box.scrollTop = row.offsetTop - $("#board thead").offsetHeight;
    const button = $(".open", row);
    if (button && button.getAttribute("aria-expanded") !== "true") toggle(button);
  }

  function restore() {
    const hash = location.hash.slice(1);
    if (hash && !hash.includes("=")) { restoring = false; return; } // a plain anchor
    restoring = true;
    const kept = new URLSearchParams(hash);
    for (const field of $$(".fields [name]:not([name=column])", form)) {
      const value = kept.get(field.name) || "";
      if (field.type === "checkbox") field.checked = value !== "";
      else field.value = value;
      if (field.value !== value && field.tagName === "SELECT") field.value = "";
    }
    chosen = kept.get("columns")?.split(",") || null;
    showColumns(chosen || atFirst());
    const keys = (kept.get("sort") || "").split(",").map((k) => [heads.findIndex((h) => h.key === k.replace(/^-/, "")), k[0] === "-" ? "desc" : "asc"]);
    table.order(keys.filter(([i]) => i >= 0));
    place = kept.get("row") || "";
    filter();
    if (place) goTo(place);
    restoring = false;
  }

  $(".choices").append(...heads.map(({ key, title }) => make("label", { className: "check" },
    make("input", { type: "checkbox", name: "column", value: key, disabled: key === "defense" }), ` ${title}`)));
  form.addEventListener("input", (event) => {
    if (event.target.name === "column") {
      chosen = $$("input", $(".choices")).filter((i) => i.checked).map((i) => i.value);
      showColumns(chosen);
      remember();
    } else filter();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(() => {
    chosen = null; place = "";
    showColumns(atFirst());
    table.order([]);
    filter();
  }));
  window.addEventListener("hashchange", restore);
  window.addEventListener("resize", () => { if (!chosen) showColumns(atFirst()); });
  window.addEventListener("beforeprint", () => table.page.len(-1).draw());

  // The rows that fit, with the columns that are shown; figures unrounded, as shown beside them.
  function downloadCsv() {
    const shown = places((h) => table.column(heads.indexOf(h)).visible());
    const quote = (text) => `"${(/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text)) ? "'" : "") + text.replaceAll('"', '""')}"`;
    const words = (cell) => {
      const copy = cell.cloneNode(true);
      for (const part of $$(".hidden, .forest, .narrow", copy)) part.remove();
      for (const part of $$("small", copy)) part.prepend(" ");
      return copy.textContent.replace(/\s+/g, " ").trim();
    };
    const lines = [shown.flatMap((i) => heads[i].text ? [heads[i].title] : [heads[i].title, `${heads[i].title} as shown`])];
    table.rows({ search: "applied", order: "applied" }).indexes().each((row) => {
      lines.push(shown.flatMap((i) => {
        const cell = table.cell(row, i).node();
        return heads[i].text ? [words(cell)] : [cell.dataset.order, words(cell)];
      }));
    });
    const text = lines.map((line) => line.map(quote).join(",")).join("\r\n");
    const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/csv" })), download: "rows.csv" });
    link.click();
    URL.revokeObjectURL(link.href);
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
          cell.append(make("small", { textContent: `baseline ${three(floor[metric])}${given === undefined ? "" : `/${three(given)}`}` }));
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

  function content({ pieces, metrics, rows: all }, index) {
    const row = all[index];
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
    const found = pictureList(index);
    if (found) inner.append(part("Reconstructions", found));
    inner.append(make("p", { className: "ends" },
      make("button", { type: "button", className: "link", textContent: "Copy the link to this view" }),
      make("button", { type: "button", className: "close", textContent: "Close" })));
    return inner;
  }

  async function toggle(button, open = button.getAttribute("aria-expanded") !== "true") {
    const row = button.closest("tr");
    const index = Number(row.dataset.i);
    button.setAttribute("aria-expanded", String(open));
    place = open ? row.id.replace("row=", "") : "";
    if (open) {
      const inner = content(await readDetails(), index);
      inner.id = `details-${index}`;
      button.setAttribute("aria-controls", inner.id);
      table.row(row).child(inner, "detail").show();
    } else table.row(row).child.remove();
    remember();
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

  function drawAlbum(cells, samples, caption) {
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

  function pictureList(index) {
    const pictures = readAlbum();
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
      offer(`${cell.attack}: ${first}`, () => drawAlbum(
        [truthOf(pictures, cell), rebuiltOf(pictures, cell, cell.attack)],
        { count: cell.scores.length, each: cell.samples }, `Truth above ${cell.attack}, ${first}`));
    }
    for (const record of pictures.records.filter((r) => r.row === index)) {
      offer(`${record.attack}: records`, () => numbers(record));
    }
    return list.children.length ? list : null;
  }

  // All settings of a table for one attack; another truth is drawn where the victims are others.
  function compare(block) {
    const pictures = readAlbum();
    const attack = $(".attack", block).value;
    const cells = pictures.cells.filter((c) => c.attack === attack && rows[c.row].dataset.table === block.dataset.table)
      .sort((a, b) => a.row - b.row);
    const strips = [];
    let truth = null;
    for (const cell of cells) {
      if (cell.truth !== truth) {
        strips.push(truthOf(pictures, cell, truth === null ? "Truth" : "Truth (other victims)"));
        truth = cell.truth;
      }
      const { defense, settings } = rowNames[cell.row];
      strips.push(rebuiltOf(pictures, cell, [make("b", { textContent: defense }), make("small", { textContent: settings })]));
    }
    const count = cells[0].scores.length;
    $(".grid", block).replaceWith(drawAlbum(strips, { count, each: cells[0].samples }, `${attack}: all settings of ${$("h2", block.closest(".board")).textContent}`));
  }

  // ---- events ----------------------------------------------------------------------------------
  // A question mark in a head explains the column and does not sort it.
  document.addEventListener("click", (event) => {
    const what = event.target.closest?.(".what");
    if (!what) return;
    event.stopPropagation();
    explain(what, make("p", { textContent: notes.columns[what.dataset.note] }));
  }, true);
  document.addEventListener("click", (event) => {
    const target = event.target.closest?.("button");
    if (!target) return;
    if (target.matches(".open")) toggle(target);
    else if (target.matches(".csv")) downloadCsv();
    else if (target.matches(".link")) {
      const said = (text) => explain(target, make("p", { textContent: text }));
      navigator.clipboard.writeText(location.href).then(() => said("Copied."), () => said(location.href));
    }
    else if (target.matches(".close")) {
      const button = $(".open", target.closest("tr").previousElementSibling);
      toggle(button, false);
      button.focus();
    } else if (target.matches(".why")) {
      explain(target, make("p", { textContent: notes.reasons[target.dataset.why] }));
    }
  });

  document.addEventListener("keypress", (event) => {
    if (event.target.matches(".what")) event.stopPropagation();
  }, true);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (note.matches(":popover-open")) {
      note.hidePopover();
      note.from.focus();
      return;
    }
    const block = event.target.closest("details[open]");
    const inner = event.target.closest(".inner");
    if (block) {
      block.open = false;
      $("summary", block).focus();
    } else if (inner || event.target.matches('.open[aria-expanded="true"]')) {
      const button = inner ? $(".open", inner.closest("tr").previousElementSibling) : event.target;
      toggle(button, false);
      button.focus();
    }
  }, true);

  document.addEventListener("change", (event) => {
    if (event.target.matches(".attack")) compare(event.target.closest(".compare"));
  });
  document.addEventListener("toggle", (event) => {
    if (event.target.matches?.(".compare") && event.target.open) compare(event.target);
  }, true);

  restore();
})();
