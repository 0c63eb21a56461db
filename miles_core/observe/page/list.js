// A list of which only the lines in view are in the document, so that forty thousand images scroll like forty.

const GAP = 10, HEAD = 62, SPARE = 600;

class List {
  /** caption(row): elements under a picture; open(number): called for a picture that was chosen. */
  constructor(element, { caption, captionHeight, open }) {
    Object.assign(this, { element, caption, captionHeight, open });
    this.sections = [];
    this.size = 160;
    this.current = 0;
    this.drawn = new Map();
    addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.layOut()).observe(element);
    element.addEventListener("click", (event) => {
      const card = event.target.closest(".card");
      if (card) this.open(Number(card.dataset.number));
    });
    element.addEventListener("focusin", (event) => {
      if (event.target.dataset.number) this.current = Number(event.target.dataset.number);
    });
    element.addEventListener("keydown", (event) => this.key(event));
  }

  /** sections: [{title?, detail?, rows}], in order. */
  show(sections, size) {
    this.sections = sections;
    this.order = sections.flatMap((section) => section.rows);
    this.size = size;
    this.current = 0;
    this.layOut();
  }

  layOut() {
    const width = this.element.clientWidth;
    this.columns = Math.max(1, Math.floor((width + GAP) / (this.size + GAP)));
    const cardWidth = Math.min((width - GAP * (this.columns - 1)) / this.columns, this.size * 1.35);
    this.cardWidth = cardWidth;
    this.pictureHeight = Math.round(cardWidth * page.aspect);
    const lineHeight = this.pictureHeight + this.captionHeight + 2;
    this.lines = [];
    let top = 0, number = 0;
    this.sections.forEach((section, place) => {
      if (section.title !== undefined) {
        this.lines.push({ top, height: HEAD, section });
        top += HEAD;
      }
      for (let start = 0; start < section.rows.length; start += this.columns) {
        const count = Math.min(this.columns, section.rows.length - start);
        this.lines.push({ top, height: lineHeight, first: number, count, place });
        number += count;
        top += lineHeight + GAP;
      }
    });
    this.element.style.height = `${top}px`;
    this.drawn.forEach((element) => element.remove());
    this.drawn.clear();
    this.draw();
  }

  draw() {
    const start = scrollY - this.element.offsetTop - SPARE, end = start + innerHeight + 2 * SPARE;
    const first = this.lineAt(start);
    const wanted = new Set();
    for (let i = first; i < this.lines.length && this.lines[i].top < end; i++) wanted.add(i);
    for (const [i, element] of this.drawn) {
      if (!wanted.has(i) && !element.contains(document.activeElement)) {
        element.remove();
        this.drawn.delete(i);
      }
    }
    for (const i of wanted) {
      if (this.drawn.has(i)) continue;
      const element = this.lines[i].section ? this.head(this.lines[i]) : this.line(this.lines[i]);
      // In reading order, also for who moves by the tab key.
      const after = [...this.drawn].filter(([other]) => other > i).sort(([a], [b]) => a - b)[0];
      this.element.insertBefore(element, after ? after[1] : null);
      this.drawn.set(i, element);
    }
  }

  /** The first line that ends below `y`. */
  lineAt(y) {
    let low = 0, high = this.lines.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.lines[middle].top + this.lines[middle].height < y) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  head({ top, height, section }) {
    const head = make("div", "head");
    head.style.top = `${top}px`;
    head.style.height = `${height}px`;
    const title = make("h2", "", section.title);
    title.title = section.title;
    head.append(title, make("p", "", section.detail));
    return head;
  }

  line({ top, first, count }) {
    const line = make("div", "line");
    line.style.top = `${top}px`;
    line.style.gridTemplateColumns = `repeat(${this.columns}, ${this.cardWidth}px)`;
    for (let number = first; number < first + count; number++) line.append(this.card(number));
    return line;
  }

  card(number) {
    const row = this.order[number];
    const card = make("button", "card");
    card.type = "button";
    card.dataset.number = number;
    const picture = make("img", page.pixels < 160 ? "small" : "");
    picture.alt = row.prompt;
    picture.src = pictureOf(row);
    picture.decoding = "async";
    picture.style.height = `${this.pictureHeight}px`;
    card.append(picture, ...this.caption(row));
    card.style.height = `${this.pictureHeight + this.captionHeight + 2}px`;
    return card;
  }

  key(event) {
    const next = this.neighbour(this.current, event.key);
    if (next === null) return;
    event.preventDefault();
    this.focus(next);
  }

  /** The image that an arrow key leads to from image `number`, or null. */
  neighbour(number, key) {
    const last = this.order.length - 1;
    if (key === "ArrowLeft") return Math.max(0, number - 1);
    if (key === "ArrowRight") return Math.min(last, number + 1);
    if (key !== "ArrowUp" && key !== "ArrowDown") return null;
    const rows = this.lines.filter((line) => !line.section);
    const at = rows.findIndex((line) => number < line.first + line.count);
    const other = rows[at + (key === "ArrowDown" ? 1 : -1)];
    return other ? other.first + Math.min(number - rows[at].first, other.count - 1) : number;
  }

  /** Bring an image into view and give it the focus. */
  focus(number) {
    const line = this.lines.find(({ first, count }) => first !== undefined && number < first + count);
    if (!line) return;
    this.current = number;
    const top = this.element.offsetTop + line.top, bar = document.getElementById("controls").offsetHeight + HEAD;
    if (top < scrollY + bar) scrollTo(0, top - bar);
    else if (top + line.height > scrollY + innerHeight) scrollTo(0, top + line.height + GAP - innerHeight);
    this.draw();
    this.element.querySelector(`[data-number="${number}"]`)?.focus({ preventScroll: true });
  }
}
