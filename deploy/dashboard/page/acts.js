// What the user does, and what is said about it.
const said = document.getElementById("said");
let hides;
const say = (text, bad) => {
  said.textContent = text;
  said.className = bad ? "bad" : "";
  said.hidden = false;
  clearTimeout(hides);
  hides = setTimeout(() => { said.hidden = true; }, 8000);
};
const ask = (what, why, yes, act) => {
  const dialog = document.getElementById("ask");
  document.getElementById("ask-what").textContent = what;
  document.getElementById("ask-why").textContent = why;
  document.getElementById("ask-yes").textContent = yes;
  dialog.returnValue = "no";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    try {
      const answer = await fetch("act", { method: "POST", headers: { authorization: "Bearer " + token(), "content-type": "application/json" }, body: JSON.stringify(act) });
      say(await answer.text(), !answer.ok);
      if (answer.ok && act.act === "mode") { for (const j of facts.jobs) if (j.name === act.job) delete chosen[j.id]; render(); }
      if (answer.ok && act.act === "workers") { delete numbers[act.job]; render(); }
    } catch (e) {
      say("nobody answered: " + e.message, true);
    }
  };
  dialog.showModal();
};
const button = (text, act) => element("button", { type: "button", onclick: act }, text);
