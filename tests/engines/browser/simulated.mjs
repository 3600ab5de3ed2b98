// The page over a simulated fleet of 200 workers, 64 shards and 5 servers that fail and come back: each view renders and goes on. How long
// that takes is printed.
import { TOKEN, audit, beyond, check, freePorts, go, main, open, say, scratch, start, until } from "./tools.mjs";

const WORKERS = 200, SHARDS = 64;
const VIEWS = {
  fleet: ["h1:has-text('Fleet of 5 servers')", ".grid .sum button:has-text('digits, 64 shards')", ".scroll[aria-label=Servers] tbody tr:nth-child(5)"],
  "job/0": ["h1:has-text('digits')", "figure canvas", ".scroll[aria-label=Workers] tbody tr:nth-child(" + WORKERS + ")", ".shares .share"],
  compare: ["h1:has-text('Runs')", "figure canvas", ".key button:has-text('digits')"],
};
const live = (page) => until("the page to be live", async () => (await page.textContent("#state")).startsWith("live, from"));

await main(async (browser) => {
  const [port] = await freePorts(1);
  const sim = start("simulated", ["simulate", "digits.toml", "--workers", String(WORKERS), "--shards", String(SHARDS), "--set", "cluster.servers=5", "--set", "cluster.bucket_bytes=300",
    "--set", "train.mode=ssp:4", "--set", "train.batch=2", "--compute-ms", "1500", "--compute-spread", "0.3", "--server-mttf-s", "15", "--server-restart-s", "5", "--run-dir", "simulated",
    "--dashboard", "127.0.0.1:" + port]);
  sim.ended.then((code) => { if (code != null) say("the simulation ended with " + code + ": " + sim.read().slice(-500)); });
  const address = (query = "") => "http://127.0.0.1:" + port + "/" + query + "#token=" + TOKEN;
  await until("the address of the page", () => sim.read().includes(address()));
  let page = await open(browser, address());
  await live(page);
  await go(page, "job/0", VIEWS["job/0"]);
  await until("points of the training", async () => (await page.locator("figure canvas").count()) > 4);

  // ---- how large: the page, and what it receives first ----
  const html = (await (await fetch(address())).arrayBuffer()).byteLength;
  const opened = (await fetch("http://127.0.0.1:" + port + "/live", { headers: { authorization: "Bearer " + TOKEN } })).body.getReader();
  let received = "";
  while (!received.includes("\n\n")) received += new TextDecoder().decode((await opened.read()).value);
  await opened.cancel();
  check(html + received.length < 1e6, "the page has " + html + " bytes, and receives " + received.length);
  say("the page has " + html + " bytes, and receives " + received.length + " at first");

  // ---- how fast: from an empty page to each view, from view to view, and from what the server says to what is on the page ----
  for (const [name, wanted] of Object.entries(VIEWS)) {
    const fresh = await open(browser, null);
    const began = Date.now();
    await fresh.goto(address() + "&" + name);
    for (const w of wanted) await fresh.locator(w).first().waitFor();
    const first = Date.now() - began;
    await go(fresh, name === "fleet" ? "compare" : "fleet", []);
    const turned = Date.now();
    await go(fresh, name, wanted);
    const again = Date.now() - turned;
    const work = await fresh.evaluate(() => new Promise((on) => {
      // What the browser's thread does in five seconds, by how long it was late for a timer of a millisecond.
      const began = performance.now();
      let before = began, busy = 0, worst = 0;
      const tick = setInterval(() => {
        const now = performance.now(), late = now - before - 5;
        before = now;
        if (late > 1) { busy += late; worst = Math.max(worst, late); }
        if (now - began > 5000) { clearInterval(tick); on([Math.round(busy / (now - began) * 100), Math.round(worst)]); }
      }, 1);
    }));
    say(name + ": on the screen " + first + " ms after it was asked for, " + again + " ms after a click; updates keep the browser busy " + work[0] + " % of the time, " + work[1] + " ms at most");
    await fresh.context().close();
  }

  // An event, on its way from the stream that the page reads as well.
  await go(page, "fleet", VIEWS.fleet);
  const stream = (await fetch("http://127.0.0.1:" + port + "/live", { headers: { authorization: "Bearer " + TOKEN } })).body.getReader();
  const heard = new Map();
  const reads = (async () => {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { value, done } = await stream.read();
      if (done) return;
      const messages = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = messages.pop();
      for (const m of messages) {
        const data = /data: (.*)/.exec(m);
        for (const e of (data && JSON.parse(data[1]).news?.events) || []) if (e.kind === "election" || e.kind === "server") heard.set(e.what, Date.now());
      }
    }
  })().catch(() => {});
  const took = [];
  while (took.length < 5) {
    const what = await until("a server to fail", () => [...heard.keys()].pop());
    await until("`" + what + "` on the page", async () => (await page.locator(".events .what").allTextContents()).includes(what));
    took.push(Date.now() - heard.get(what));
    heard.clear();
  }
  await stream.cancel();
  await reads;
  say("events are on the page " + took.join(", ") + " ms after the server has said them");

  // ---- what it shows ----
  check((await page.locator("main button:has-text('drain'), main button:has-text('stop')").count()) === 0, "something can be done to a simulated fleet");
  check((await page.textContent(".headline")).includes("Simulated"), "the page does not say that the fleet is simulated");
  const all = await page.locator(".grid tbody tr").count();
  check(all < SHARDS, "64 shards are shown at once: " + all + " rows");
  await page.click(".grid .fold");
  await until("all shards", async () => (await page.locator(".grid tbody tr").count()) === SHARDS + 1);
  const rows = await page.locator(".grid").textContent();
  await until("the shards to go on", async () => (await page.locator(".grid").textContent()) !== rows);
  check((await page.locator(".grid tbody tr").count()) === SHARDS + 1, "what was unfolded is folded by an update");
  await page.click(".grid .fold");
  await until("them folded again", async () => (await page.locator(".grid tbody tr").count()) < SHARDS);
  await go(page, "job/0", VIEWS["job/0"]);
  const steps = await page.textContent(".facts");
  await until("the job to go on", async () => (await page.textContent(".facts")) !== steps);
  check((await page.locator("main .acts").count()) === 0, "something can be done to a simulated job");
  say("it is updated, says that it is simulated, and offers nothing to do; 64 shards fold");

  const faults = [];
  for (const theme of ["light", "dark"]) {
    for (const width of [1280, 390]) {
      const seen = await open(browser, address("?theme=" + theme), { width });
      for (const [name, wanted] of Object.entries(VIEWS)) {
        await go(seen, name, wanted);
        const where = "simulated, " + name + ", " + theme + ", " + width + " pixels: ";
        await seen.screenshot({ path: scratch + "/out/" + ["simulated", name.replace("/0", ""), theme, width].join("-") + ".png", fullPage: true });
        faults.push(...(await audit(seen)).map((v) => where + v));
        const wide = await beyond(seen);
        if (wide > 0) faults.push(where + "the document is " + wide + " pixels wider than the window");
      }
      await seen.context().close();
    }
  }
  check(faults.length === 0, faults.join("\n  "));
  say("nothing serious for axe, nothing wider than the window");
  sim.child.kill("SIGINT");
});
