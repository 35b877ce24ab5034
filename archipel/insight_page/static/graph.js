/* The picture of a graph: boxes and lines as SVG, moved and zoomed by pointer, touch and keys. */

const LABELLED = 150;

class GraphView {
  /** chosen: called with the id of the box that was chosen; weigh: box -> 0 to 1 for its colour, or null. */
  constructor(folding, chosen) {
    this.folding = folding;
    this.graph = folding.graph;
    this.chosen = chosen;
    this.weigh = null;
    this.current = null;
    this.scale = 1;
    this.left = 0;
    this.top = 0;
    this.content = svg("g");
    const arrow = svg("marker", { id: "arrow", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" });
    arrow.append(svg("path", { d: "M0,0.5L7.5,4L0,7.5Z", class: "arrow" }));
    this.picture = svg("svg", { class: "graph", role: "group", "aria-roledescription": "graph", "aria-label": this.words() }, svg("defs", {}, arrow), this.content);
    this.element = el("div", { class: "canvas" }, this.picture);
    this.pointers = new Map();
    this.picture.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.picture.addEventListener("pointerdown", (event) => this.down(event));
    this.picture.addEventListener("pointermove", (event) => this.move(event));
    for (const end of ["pointerup", "pointercancel"]) this.picture.addEventListener(end, (event) => this.pointers.delete(event.pointerId));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resized()).observe(this.element);
  }

  words() {
    const { nodes, scopes } = this.graph;
    return `Graph ${this.graph.name}: ${nodes.length} nodes in ${scopes.length} scopes. Arrow keys go along the lines, Enter opens, Backspace closes the scope around.`;
  }

  /** Lay out and draw what is open; `keep` is a box that stays where it is on the screen. */
  draw(keep = null) {
    const before = keep && this.place(keep);
    this.plan = layOut(this.folding);
    const { frames, edges, boxes } = this.plan;
    this.content.replaceChildren(
      ...[...frames].map(([id, place]) => this.frame(id, place)),
      ...edges.map((edge) => this.line(edge, edges.length <= LABELLED)),
      ...[...boxes].map(([id, place]) => this.box(id, place)),
    );
    const after = keep && this.place(keep);
    if (before && after) {
      this.left += (before.x - after.x) * this.scale;
      this.top += (before.y - before.height / 2 - (after.y - after.height / 2)) * this.scale;
      this.show();
    } else this.fit();
    this.choose(this.current, false);
  }

  place(id) {
    return this.plan?.boxes.get(id) ?? this.plan?.frames.get(id);
  }

  frame(id, place) {
    const box = this.folding.boxes.get(id);
    const left = place.x - place.width / 2;
    const top = place.y - place.height / 2;
    const group = svg(
      "g",
      { class: "frame", "data-id": id, tabindex: -1, role: "button", "aria-expanded": "true", "aria-label": `scope ${this.folding.path(id)}, ${box.nodes} nodes` },
      svg("rect", { x: left, y: top, width: place.width, height: place.height, rx: 12 }),
      svg("text", { class: "title", x: left + 12, y: top + 15 }, `\u2212 ${shorten(box.name)}`),
    );
    group.addEventListener("click", (event) => this.click(event, id));
    return group;
  }

  box(id, place) {
    const box = this.folding.boxes.get(id);
    const scope = box.kind === "scope";
    const kind = scope ? "folded" : box.kind === "node" ? `node ${family(box.node.op)}` : "end";
    const left = place.x - place.width / 2;
    const top = place.y - place.height / 2;
    const weight = this.weigh?.(box) ?? null;
    const label = scope ? `scope ${this.folding.path(id)}, ${box.nodes} nodes` : `${place.lines.join(", ")}`;
    const group = svg("g", {
      class: `box ${kind}${weight === null ? "" : ` heat-${Math.min(5, Math.floor(weight * 6))}`}`,
      "data-id": id,
      tabindex: -1,
      role: "button",
      "aria-label": label,
      "aria-expanded": scope ? "false" : null,
    });
    if (scope) group.append(svg("rect", { class: "behind", x: left + 4, y: top + 4, width: place.width, height: place.height, rx: 8 }));
    group.append(svg("rect", { class: "face", x: left, y: top, width: place.width, height: place.height, rx: box.kind === "node" || scope ? 8 : place.height / 2 }));
    if (box.kind === "node") group.append(svg("rect", { class: "strip", x: left, y: top + 7, width: 4, height: place.height - 14, rx: 2 }));
    place.lines.forEach((line, at) =>
      group.append(svg("text", { class: at ? "detail" : "name", x: place.x, y: top + 21 + 17 * at }, `${scope && !at ? "+ " : ""}${line} `)),
    );
    group.append(svg("title", {}, label));
    group.addEventListener("click", (event) => this.click(event, id));
    return group;
  }

  line(edge, labelled) {
    const values = edge.values.map((at) => this.graph.values[at]);
    const group = svg("g", { class: "line" }, svg("path", { d: curve(edge.points), "marker-end": "url(#arrow)" }));
    group.append(svg("title", {}, values.slice(0, 8).map((value) => `${value.name}: ${typeText(value)}`).join("\n")));
    if (labelled) {
      const text = values.length > 1 ? `${values.length} values` : values[0].shape ? shapeText(values[0].shape) : "";
      const middle = edge.points[Math.floor(edge.points.length / 2)];
      group.append(svg("text", { x: middle.x + 5, y: middle.y + 4 }, shorten(text, 24)));
    }
    edge.element = group;
    return group;
  }

  // --- choosing -------------------------------------------------------------------------------------------------

  click(event, id) {
    event.stopPropagation();
    if (this.dragged) return;
    if (this.folding.boxes.get(id).kind === "scope") this.toggle(id);
    else this.choose(id);
  }

  toggle(id) {
    if (!this.folding.toggle(id)) {
      tell(`This scope has too much in it to be drawn with all that is open: fold others first.`);
      return;
    }
    this.draw(id);
    this.choose(id);
    tell(`${this.folding.path(id) || "scope"} ${this.folding.open.has(id) ? "unfolded" : "folded"}`);
  }

  /** Make a box the current one; `focus`: also move the keyboard there. */
  choose(id, focus = true) {
    const found = id && this.content.querySelector(`[data-id="${id}"]`);
    for (const each of this.content.querySelectorAll(".current")) each.classList.remove("current");
    const first = this.content.querySelector(".box");
    for (const each of this.content.querySelectorAll("[tabindex='0']")) each.setAttribute("tabindex", -1);
    (found ?? first)?.setAttribute("tabindex", 0);
    for (const edge of this.plan.edges) edge.element.classList.toggle("near", edge.from === id || edge.to === id);
    if (!found) return;
    this.current = id;
    found.classList.add("current");
    if (!focus) return;
    found.focus({ preventScroll: true });
    this.intoSight(id);
    this.chosen(id);
  }

  /** Unfold what is around a box, and show it in the middle. */
  goTo(id) {
    this.folding.reveal(id);
    this.draw();
    const place = this.place(id);
    if (!place) return;
    this.scale = Math.max(this.scale, 0.9);
    this.centre(place);
    this.choose(id);
  }

  centre(place) {
    const { width, height } = this.element.getBoundingClientRect();
    this.left = width / 2 - place.x * this.scale;
    this.top = height / 2 - place.y * this.scale;
    this.show();
  }

  intoSight(id) {
    const place = this.place(id);
    const { width, height } = this.element.getBoundingClientRect();
    const x = place.x * this.scale + this.left;
    const y = (place.y - (this.folding.open.has(id) ? place.height / 2 : 0)) * this.scale + this.top;
    if (x < 40 || x > width - 40 || y < 30 || y > height - 30) this.centre({ x: place.x, y: (y - this.top) / this.scale });
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const side = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const id = event.target.closest?.("[data-id]")?.dataset.id ?? this.current;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "+" || event.key === "=") this.zoom(1.25);
    else if (event.key === "-") this.zoom(0.8);
    else if (event.key === "0") this.fit(0);
    else if (!id) return;
    else if (step) this.along(id, step);
    else if (side) this.beside(id, side);
    else if (event.key === "Enter" || event.key === " ") {
      if (this.folding.boxes.get(id).kind === "scope") this.toggle(id);
      else this.choose(id);
    } else if (event.key === "Backspace") this.out(id);
    else return;
    event.preventDefault();
  }

  along(id, step) {
    const near = this.plan.edges.filter((edge) => (step > 0 ? edge.from : edge.to) === id);
    const ids = near.map((edge) => (step > 0 ? edge.to : edge.from));
    if (ids.length) this.choose(ids[0]);
    else if (this.plan.frames.has(id)) this.choose(this.folding.seen().find((each) => this.folding.path(each).startsWith(this.folding.path(id))) ?? id);
  }

  beside(id, side) {
    const own = this.place(id);
    const others = [...this.plan.boxes].filter(([other, place]) => other !== id && Math.abs(place.y - own.y) < 60 && (place.x - own.x) * side > 0);
    others.sort(([, a], [, b]) => (a.x - b.x) * side);
    if (others.length) this.choose(others[0][0]);
  }

  out(id) {
    const { parent } = this.folding.boxes.get(id);
    if (!parent || parent === "s0") return;
    this.folding.open.delete(parent);
    this.draw();
    this.choose(parent);
  }

  // --- moving ---------------------------------------------------------------------------------------------------

  show() {
    this.content.setAttribute("transform", `translate(${this.left.toFixed(2)},${this.top.toFixed(2)}) scale(${this.scale.toFixed(4)})`);
  }

  /** All of it; or, where it would be smaller than `least`, its beginning. */
  fit(least = 0.75) {
    const { width, height } = this.element.getBoundingClientRect();
    if (!width || !this.plan) return;
    // Not so small that nothing can be read: then from the top.
    const above = this.element.previousSibling?.offsetHeight + 14 || 0;
    const whole = Math.min(width / this.plan.width, (height - above) / this.plan.height, 1.1);
    this.scale = Math.max(whole, least);
    const wide = this.plan.width * this.scale;
    const first = [...this.plan.boxes.values()].reduce((a, b) => (b.y < a.y ? b : a));
    this.left = wide <= width ? (width - wide) / 2 : width / 2 - first.x * this.scale;
    this.top = above + Math.max(0, (height - above - this.plan.height * this.scale) / 2);
    this.show();
  }

  resized() {
    if (!this.plan || this.fitted) return;
    this.fitted = true;
    this.fit();
  }

  zoom(by, x, y) {
    const { width, height } = this.element.getBoundingClientRect();
    const [px, py] = [x ?? width / 2, y ?? height / 2];
    const scale = Math.min(3, Math.max(0.05, this.scale * by));
    this.left = px - ((px - this.left) * scale) / this.scale;
    this.top = py - ((py - this.top) * scale) / this.scale;
    this.scale = scale;
    this.show();
  }

  at(event) {
    const { left, top } = this.element.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  wheel(event) {
    event.preventDefault();
    this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), ...this.at(event));
  }

  down(event) {
    if (event.button) return;
    this.pointers.set(event.pointerId, this.at(event));
    this.dragged = false;
    this.begun = this.at(event);
  }

  move(event) {
    const before = this.pointers.get(event.pointerId);
    if (!before) return;
    const now = this.at(event);
    if (Math.hypot(now[0] - this.begun[0], now[1] - this.begun[1]) > 4 && !this.dragged) {
      this.dragged = true;
      this.picture.setPointerCapture(event.pointerId);
    }
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    this.pointers.set(event.pointerId, now);
    if (others.length) {
      const [other] = others;
      const far = (at) => Math.hypot(at[0] - other[0], at[1] - other[1]) || 1;
      this.zoom(far(now) / far(before), other[0], other[1]);
    } else if (this.dragged) {
      this.left += now[0] - before[0];
      this.top += now[1] - before[1];
      this.show();
    }
  }
}
