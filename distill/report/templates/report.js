"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "[]");
  const make = (tag, text = "", name = "") => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (name) element.className = name;
    return element;
  };

  // Token view: one tooltip, filled from the data island; text goes in as text, never as markup.
  const tokens = read("token-data");
  const tooltip = document.getElementById("tooltip");
  const WRITERS = {
    draft: "written by the draft, accepted", target: "written by the target, a correction", bonus: "written by the target, a bonus",
  };
  const shown = (text) =>
    text === "" ? "∅" : text.replace(/^ +| +$/g, (run) => "␣".repeat(run.length)).replace(/\n/g, "↵").replace(/\t/g, "⇥")
      .replace(/[\u0000-\u001f]/g, (sign) => String.fromCharCode(0x2400 + sign.charCodeAt(0)));
  const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)} %`);
  const top = (title, pairs, said) => {
    const column = make("div");
    column.append(make("h4", title));
    const list = make("ol");
    for (const [text, share] of pairs || []) {
      const row = make("li", "", text === said ? "said" : "");
      row.append(make("code", shown(text)), make("span", percent(share)));
      list.append(row);
    }
    column.append(list);
    return column;
  };
  let current = null;
  const place = (span) => {
    const boxes = span.getClientRects();
    const box = boxes[0] || span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = tooltip;
    const below = (boxes[boxes.length - 1] || box).bottom + 8;
    const over = box.top - height - 8;
    tooltip.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8))}px`;
    tooltip.style.top = `${below + height < innerHeight || over < 0 ? below : over}px`;
  };
  const tokenOf = (event) => (event.target instanceof Element ? event.target.closest(".tokens .t") : null);
  const show = (span) => {
    const spans = [...span.parentElement.children];
    const token = tokens[span.parentElement.dataset.response][spans.indexOf(span)];
    const first = make("p");
    first.append(make("code", shown(token.text)), ` id ${token.id}, ${WRITERS[token.by]}, block ${token.block + 1}`);
    const second = make("p", `probability: target ${percent(token.target_prob)}, draft ${percent(token.draft_prob)}`);
    const tops = make("div", "", "tops");
    tops.append(top("target's most probable", token.target_top, token.text), top("draft's most probable", token.draft_top, token.text));
    tooltip.replaceChildren(first, ...(token.target_prob === null && token.draft_prob === null ? [] : [second]), tops);
    tooltip.hidden = false;
    if (current) current.removeAttribute("aria-describedby");
    current = span;
    span.setAttribute("aria-describedby", "tooltip");
    place(span);
  };
  const hide = () => {
    tooltip.hidden = true;
    if (current) current.removeAttribute("aria-describedby");
    current = null;
  };
  const showFor = (event) => {
    const span = tokenOf(event);
    if (span) show(span);
  };
  document.addEventListener("pointerover", (event) => (event.pointerType === "mouse" ? showFor(event) : null));
  document.addEventListener("focusin", showFor);
  document.addEventListener("click", showFor);
  document.addEventListener("pointerout", (event) => (tokenOf(event) && event.pointerType === "mouse" ? hide() : null));
  document.addEventListener("focusout", (event) => (tokenOf(event) ? hide() : null));
  // A focus scrolls its token into view: the tooltip follows instead of closing.
  addEventListener("scroll", () => (current ? place(current) : null), { passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return hide();
    const span = tokenOf(event);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!span || !step) return;
    event.preventDefault();
    const spans = [...span.parentElement.children];
    const next = spans[Math.max(0, Math.min(spans.length - 1, spans.indexOf(span) + step))];
    span.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });

  // Commands can be copied; where the clipboard is closed, the text is selected instead.
  for (const block of document.querySelectorAll(".copyable")) {
    const button = make("button", "copy");
    button.type = "button";
    button.addEventListener("click", async () => {
      const code = block.querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "selected";
      }
    });
    block.append(button);
  }
  // Paper has no folds.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const fold of folded) fold.open = true;
  });
  addEventListener("afterprint", () => {
    for (const fold of folded) fold.open = false;
  });
})();
