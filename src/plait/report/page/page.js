"use strict";
// Filters, sorting, tooltips and the theme. The state of filters and sorting is kept in the address, so that a view
// can be linked to: #filter=op:spmm,device:cpu&sort=layers:4:descending
(async () => {
  // long sections of a large page come compressed
  for (const box of document.querySelectorAll("[data-packed]")) {
    const bytes = Uint8Array.from(atob(box.dataset.packed), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    box.outerHTML = await new Response(stream).text();
  }

  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const FACETS = ["op", "device", "graph"];
  const ROWS = 40; // rows a table shows before it is asked for all
  const state = { filter: {}, sort: null, whole: new Set() };

  const encode = (text) => encodeURIComponent(text).replace(/%20/g, "+");
  const decode = (text) => { try { return decodeURIComponent(text.replace(/\+/g, " ")); } catch { return ""; } };

  function readAddress() {
    state.filter = {};
    state.sort = null;
    for (const part of location.hash.slice(1).split("&")) {
      const [name, value = ""] = part.split("=");
      if (name === "filter") {
        for (const pair of value.split(",")) {
          const at = pair.indexOf(":");
          if (at > 0 && FACETS.includes(pair.slice(0, at))) state.filter[pair.slice(0, at)] = decode(pair.slice(at + 1));
        }
      } else if (name === "sort") {
        const [table, column, order] = value.split(":");
        state.sort = { table, column: Number(column), order };
      } else if (name === "theme") {
        setTheme(value);
      }
    }
  }

  function writeAddress() {
    const parts = [];
    const chosen = FACETS.filter((facet) => state.filter[facet]);
    if (chosen.length) parts.push("filter=" + chosen.map((facet) => `${facet}:${encode(state.filter[facet])}`).join(","));
    if (state.sort) parts.push(`sort=${state.sort.table}:${state.sort.column}:${state.sort.order}`);
    history.replaceState(null, "", parts.length ? "#" + parts.join("&") : location.pathname + location.search);
  }

  function applyFilter() {
    const chosen = FACETS.filter((facet) => state.filter[facet]);
    for (const element of all("[data-op],[data-device],[data-graph]")) {
      const out = chosen.some((facet) => facet in element.dataset && element.dataset[facet] !== state.filter[facet]);
      element.classList.toggle("fade" in element.dataset ? "dim" : "off", out);
    }
    for (const container of all("[data-shrinks]").reverse()) { // the inner ones first
      const members = all(container.dataset.shrinks, container);
      container.classList.toggle("off", members.length > 0 && members.every((m) => m.matches(".off, .dim")));
    }
    all("[data-lanes]").forEach(closeGaps);
    for (const facet of FACETS) document.getElementById(`filter-${facet}`).value = state.filter[facet] || "";
    const rows = all(".data tbody tr");
    const left = rows.filter((row) => !row.classList.contains("off")).length;
    document.getElementById("count").textContent =
      chosen.length ? `${left.toLocaleString("en")} of ${rows.length.toLocaleString("en")} timings` : `${rows.length.toLocaleString("en")} timings`;
    document.getElementById("clear").hidden = !chosen.length;
    all("table.data").forEach(limitRows);
  }

  // Rows of a figure that a filter emptied leave no hole, and the figure gets shorter.
  function closeGaps(stack) {
    const step = Number(stack.dataset.lanes);
    const top = Number(stack.dataset.top);
    const left = [...stack.children].filter((lane) => {
      const empty = !lane.querySelector(".mark:not(.off)");
      lane.style.display = empty ? "none" : "";
      return !empty && !lane.classList.contains("off");
    });
    left.forEach((lane, place) => lane.setAttribute("transform", `translate(0 ${top + (place + 0.5) * step})`));
    const drawing = stack.ownerSVGElement;
    const height = top + left.length * step + 6;
    drawing.setAttribute("viewBox", `0 0 ${drawing.viewBox.baseVal.width} ${height}`);
    drawing.setAttribute("height", height);
    drawing.style.overflow = "hidden";
  }

  function limitRows(table) {
    const shown = all("tbody tr:not(.off)", table);
    const whole = state.whole.has(table.id);
    shown.forEach((row, place) => { row.hidden = !whole && place >= ROWS; });
    const button = table.parentElement.nextElementSibling;
    button.hidden = whole || shown.length <= ROWS;
    button.textContent = `show all ${shown.length.toLocaleString("en")}`;
  }

  function applySort() {
    if (!state.sort) return;
    const table = document.getElementById(state.sort.table);
    if (!table || !table.tHead) return;
    const { column, order } = state.sort;
    const heads = all("th", table.tHead);
    if (!heads[column]) return;
    heads.forEach((head, place) => (place === column ? head.setAttribute("aria-sort", order) : head.removeAttribute("aria-sort")));
    const value = (row) => { const cell = row.cells[column]; return "v" in cell.dataset ? Number(cell.dataset.v) : cell.textContent; };
    const sign = order === "descending" ? -1 : 1;
    const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
    const rows = all("tbody tr", table).map((row) => [value(row), row]);
    rows.sort((a, b) => sign * compare(a[0], b[0]));
    table.tBodies[0].append(...rows.map((pair) => pair[1]));
    limitRows(table);
  }

  function prepareTables() {
    for (const table of all("table.data")) {
      const more = document.createElement("button");
      more.type = "button";
      more.className = "more";
      more.addEventListener("click", () => { state.whole.add(table.id); limitRows(table); });
      table.parentElement.after(more);
      all("thead button", table).forEach((button, column) => button.addEventListener("click", () => {
        const is_up = button.parentElement.getAttribute("aria-sort") === "ascending";
        state.sort = { table: table.id, column, order: is_up ? "descending" : "ascending" };
        applySort();
        writeAddress();
      }));
    }
  }

  // Tooltips: the titles of marks, shown at once and under our own style; arrow keys walk the marks of a figure.
  const tip = document.createElement("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  tip.setAttribute("aria-live", "polite");
  tip.hidden = true;

  function showTip(element) {
    const text = element.dataset.tip;
    if (!text) return;
    tip.textContent = text;
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    const middle = box.left + Math.min(box.width, 600) / 2;
    const left = Math.min(Math.max(8, middle - tip.offsetWidth / 2), innerWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 4 ? above : box.bottom + 8}px`;
  }

  function prepareTips() {
    document.body.append(tip);
    for (const mark of all(".mark, td.strip svg")) {
      const title = mark.querySelector(":scope > title");
      if (title) { mark.dataset.tip = title.textContent; mark.setAttribute("aria-label", title.textContent); title.remove(); }
    }
    for (const title of all("figure svg > title")) title.remove(); // aria-label says the same, and no tip covers ours
    const over = (event) => { const found = event.target.closest("[data-tip]"); if (found) showTip(found); else tip.hidden = true; };
    document.addEventListener("pointerover", over);
    document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
    for (const drawing of all("figure svg")) {
      if (drawing.querySelector(".mark")) walkable(drawing, ".mark:not(.off)");
    }
    for (const box of all(".wide-scroll")) walkable(box, "td[data-tip]:not(.off)");
  }

  function walkable(box, selector) {
    box.setAttribute("tabindex", "0");
    box.setAttribute("role", "group"); // a picture would hide its marks from those who cannot see it
    let place = -1;
    box.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      const marks = all(selector, box).filter((mark) => mark.getClientRects().length);
      if (!marks.length) return;
      event.preventDefault();
      marks.forEach((mark) => mark.classList.remove("at"));
      place = (place + step + marks.length) % marks.length;
      marks[place].classList.add("at");
      showTip(marks[place]);
    });
    box.addEventListener("blur", () => { all(".at", box).forEach((mark) => mark.classList.remove("at")); tip.hidden = true; });
  }

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  function setTheme(name) {
    if (name === "dark" || name === "light") document.documentElement.dataset.theme = name;
    document.getElementById("theme").textContent = isDark() ? "light" : "dark";
  }

  // a page opened from a file may not be allowed to remember
  function remembered() { try { return localStorage.getItem("plait-theme"); } catch { return null; } }
  function remember(name) { try { localStorage.setItem("plait-theme", name); } catch { /* as above */ } }

  document.getElementById("theme").addEventListener("click", () => { const name = isDark() ? "light" : "dark"; setTheme(name); remember(name); });
  document.getElementById("filters").addEventListener("change", (event) => { state.filter[event.target.name] = event.target.value; applyFilter(); writeAddress(); });
  document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("clear").addEventListener("click", () => { state.filter = {}; applyFilter(); writeAddress(); });
  addEventListener("hashchange", () => { readAddress(); applyFilter(); applySort(); });

  setTheme(remembered());
  prepareTables();
  prepareTips();
  readAddress();
  applyFilter();
  applySort();
})();
