// A job's record, once, and again when something has happened to the job; numbers of the script's own are only there.
const RECORD_AGE = 3000, NUMBERS_AGE = 30000;
const wantRecord = async (id) => {
  const j = facts.jobs.find((j) => j.id === id), known = records.get(id) || { of: null, at: 0 };
  if (!j || ended) return;
  const happened = events.filter((e) => e.job === id || e.job == null), of = j.state + since + "," + happened.filter((e) => e.kind !== "evaluation" && e.kind !== "action").length + (namesOf(id).length && runsOn(j) ? "," + Math.floor(Date.now() / NUMBERS_AGE) : "");
  if (known.of === of || known.asks || Date.now() - known.at < RECORD_AGE) return;
  records.set(id, { ...known, asks: true });
  const now = { ...known, of, at: Date.now(), asks: false };
  try {
    const answer = await get("record?job=" + id);
    if (answer.status === 200) now.record = await answer.json();
  } catch (e) { /* the stream says so */ }
  if (ended) return;
  records.set(id, now);
  render();
};
