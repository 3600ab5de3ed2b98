// The page over a real fleet: four servers, two jobs of two workers each.
import { existsSync, readFileSync } from "node:fs";
import { createServer, request } from "node:http";
import { TOKEN, audit, beyond, check, freePorts, go, main, open, run, say, scratch, start, until } from "./tools.mjs";

const [p0, p1, p2, p3, d0, d1, d2, d3, proxyPort, strangerPort] = await freePorts(10);
const servers = [p0, p1, p2, p3].map((p) => "127.0.0.1:" + p).join(",");
const pages = [d0, d1, d2, d3].map((p) => "127.0.0.1:" + p);
const address = (id, path = "/") => "http://" + pages[id] + path + "#token=" + TOKEN;

const fleet = {};
const startServer = (id) => {
  fleet[id] = start("server-" + id, ["server", "--servers", servers, "--id", String(id), "--shards", "3", "--replicas", "3", "--election-ms", "300",
    "--data", scratch + "/data-" + id, "--dashboard", pages[id]]);
};
const train = (job) => start("train-" + job, ["train", "digits.toml", "--set", "name=" + job, "--set", "eval.every_epoch=true", "--fleet", servers, "--run-dir", "run-" + job]);
const status = async () => {
  const lines = (await run("status", "--fleet", servers, "--json")).trim().split("\n").map((l) => JSON.parse(l));
  return { ...lines.find((l) => l.jobs), replies: lines.filter((l) => l.shards && !l.jobs) };
};
const jobOf = async (name) => (await status()).jobs.find((j) => j.job === name);
const modes = async (name) => {
  const s = await status(), number = s.jobs.find((j) => j.job === name).number;
  return s.replies.flatMap((r) => r.shards).filter((h) => h.job === number && h.role === "leader").map((h) => h.mode);
};
const isIn = (mode) => async () => {
  const all = await modes("digits");
  return all.length === 3 && all.every((m) => m === mode);
};

const JOB = ["h1:has-text('digits')", ".facts dd", "figure canvas", "section[aria-label=Workers], .scroll[aria-label=Workers] tbody tr", ".shares .share"];
const VIEWS = {
  fleet: ["h1:has-text('Fleet of 4 servers')", ".scroll[aria-label=Jobs] a:has-text('digits')", ".grid .leads", ".scroll[aria-label=Servers] tbody tr", ".events li"],
  job: JOB,
  compare: ["h1:has-text('Runs')", ".scroll[aria-label=Runs] tbody tr", "figure canvas", ".key button:has-text('digits')", ".key button:has-text('other')"],
};
const live = (page) => until("the page to be live", async () => (await page.textContent("#state")).startsWith("live, from"));
const yes = async (page, what) => {
  await page.locator("dialog#ask[open]").waitFor();
  check((await page.textContent("#ask-what")).includes(what), "the dialog asks: " + (await page.textContent("#ask-what")));
  check((await page.textContent("#ask-why")).length > 20, "the dialog does not say what comes of it");
  const answered = page.waitForResponse((r) => r.url().endsWith("/act"));
  await page.click("#ask-yes");
  const answer = await (await answered).text();
  await until("the answer on the page", async () => (await page.locator("#said:not([hidden])").textContent()) === answer);
  return answer;
};

await main(async (browser) => {
  // The address that `paraft train` prints lets a person in.
  await run("train", scratch + "/digits.toml", "--set", "train.epochs=20", "--set", "eval.every_epoch=true", "--run-dir", scratch + "/earlier", "--json");
  const own = start("train", ["train", "digits.toml", "--run-dir", "run", "--faults"], { PARAFT_DASHBOARD_TOKEN: "" });
  const printed = await until("the address of the page", () => /page\s+(http:\/\/\S+#token=\w+)/.exec(own.read())?.[1]);
  const first = await open(browser, printed);
  // It opens on the only job, with its loss.
  for (const wanted of ["h1:has-text('digits')", "figure:has-text('Training and held-out loss') canvas"]) await first.locator(wanted).first().waitFor();
  say("`paraft train` prints an address, and that lets in, to the loss of the job");

  // ---- a job with its record: from its begin, with how far it is; axes; what can be saved ----
  const progress = await until("how far it is", async () => first.locator(".progress").textContent({ timeout: 500 }));
  check(/^\d+(\.\d)? %.*epoch \d.* of 1000000.*step .* of /.test(progress), "progress: " + progress);
  check((await first.locator("figure:has-text('Steps ahead')").count()) === 0, "in bsp a chart is a constant");
  const figures = first.locator("figure").first(), saved = async (kind) => {
    const [file] = await Promise.all([first.waitForEvent("download"), figures.locator("button:text-is('" + kind + "')").click()]);
    await file.saveAs(scratch + "/out/" + file.suggestedFilename());
    return readFileSync(scratch + "/out/" + file.suggestedFilename());
  };
  for (const [x, column] of [["step", "steps"], ["epoch", "epochs"], ["samples", "samples"], ["time", "seconds"]]) {
    await first.selectOption("select[aria-label='Horizontal axis']", x);
    const lines = await until("the axis of " + x, async () => { const text = String(await saved("CSV")); const rows = text.trim().split("\n"); return text.startsWith(column + ",training") && rows.length > 3 && rows; });
    const at = lines.slice(1).map((l) => +l.split(",")[0]);
    check(at.every((v, i) => i === 0 || v > at[i - 1]), "places over " + x + ": " + at);
  }
  await first.check(".tools input[type=checkbox]");
  await first.locator("input[aria-label=Smoothing]").fill("0.5");
  await until("smoothing", async () => (await first.textContent(".tools output")).trim() === "0.50");
  check((await saved("PNG")).subarray(1, 4).toString() === "PNG", "that is no picture");
  await first.screenshot({ path: scratch + "/out/job-recorded.png", fullPage: true });
  const found = await audit(first);
  say("a job's record: progress, four axes, logarithm, smoothing, PNG and CSV");
  await go(first, "fleet", ["h1:has-text('Fleet of ')", ".scroll[aria-label=Jobs] a:has-text('digits')"]);

  // ---- what the host of a run's own fleet can do: faults, how many workers, runs that were recorded ----
  const points = first.locator("section", { has: first.locator("h2:has-text('Faults on purpose')") });
  const file = () => JSON.parse(readFileSync(scratch + "/run/faults.json", "utf8"));
  await points.locator("select[aria-label=Server]").selectOption("1");
  await points.locator("select[aria-label=Fault]").selectOption("partition");
  await points.locator("button:text-is('put')").click();
  check((await yes(first, "Put partition on s1?")).includes("partition is put on s1"), "put: " + (await first.textContent("#said")));
  check(file().isolated[0] === 1, "the file of the fault points: " + JSON.stringify(file()));
  await until("s1 to be cut off", async () => !(await first.locator(".scroll[aria-label=Servers] tbody tr", { hasText: "s1" }).textContent()).includes("up"));
  await first.screenshot({ path: scratch + "/out/faults.png", fullPage: true });
  found.push(...(await audit(first)));
  await points.locator("button:text-is('take back')").click();
  await yes(first, "Take partition back from s1?");
  check(file().isolated.length === 0, "the file of the fault points: " + JSON.stringify(file()));
  await until("s1 to be back", async () => (await first.locator(".scroll[aria-label=Servers] tbody tr", { hasText: "s1" }).textContent()).includes("up"));
  say("a fault put and taken back: in the file that `paraft chaos` writes, and on the page");
  await first.locator(".scroll[aria-label=Jobs] a:has-text('digits')").click();
  const rows = () => first.locator(".scroll[aria-label=Workers] tbody tr").count();
  await until("two workers", async () => (await rows()) === 2);
  await first.fill("input[aria-label=Workers]", "1");
  await first.click("text=set workers");
  await yes(first, "1 worker, not 2?");
  await until("one worker", async () => (await rows()) === 1);
  await run("fleet", "scale", scratch + "/run", "--workers", "2");
  await until("two workers again", async () => (await rows()) === 2);
  say("set workers: as `paraft fleet scale`");
  await go(first, "compare", ["h1:has-text('Runs')", "input[name=earlier]"]);
  await first.check("input[name=earlier]");
  await first.locator(".key button:has-text('earlier')").first().waitFor();
  await first.screenshot({ path: scratch + "/out/compare-earlier.png", fullPage: true });
  found.push(...(await audit(first)));
  await first.uncheck("input[name=earlier]");
  await until("one line again", async () => (await first.locator(".key button:has-text('earlier')").count()) === 0);
  // The table has the results of the run, and sorts by them.
  const earlier = first.locator(".scroll[aria-label=Runs] tbody tr", { hasText: "earlier" });
  check((await earlier.textContent()).includes("finished"), "the row: " + (await earlier.textContent()));
  for (const order of ["descending", "ascending"]) {
    await first.locator(".scroll[aria-label=Runs] thead button:text-is('loss')").click();
    await until("the order", async () => (await first.locator(".scroll[aria-label=Runs] th[aria-sort]").getAttribute("aria-sort")) === order);
  }
  say("a run that was recorded beside a job that trains, and its row in the table of runs");

  // ---- the end of the run, on a page that is open ----
  await go(first, "job/0", ["h1:has-text('digits')"]);
  own.child.kill("SIGINT");
  await first.locator(".end").waitFor({ timeout: 90000 });
  const end = await first.textContent(".end");
  check(/Stopped before its end after .* of training.*loss .*samples\/s.*report .*\/run\/report\.html/.test(end), "the end: " + end);
  await own.ended;
  check(existsSync(scratch + "/run/report.html"), "there is no report");
  await until("the page to say so", async () => (await first.textContent("#state")) === "the run has ended");
  check((await first.locator(".acts, #state.lost").count()) === 0, "the page of an ended run offers actions, or an alarm");
  await first.screenshot({ path: scratch + "/out/ended.png", fullPage: true });
  found.push(...(await audit(first)));
  await first.context().close();
  say("an open page shows how the run has ended, with figures and the report");

  // ---- its page from the record ----
  const dashboard = start("ended", ["dashboard", "--fleet", "run"]);
  const again = await open(browser, await until("its address", () => /page\s+(http:\/\/\S+#token=\w+)/.exec(dashboard.read())?.[1]));
  for (const wanted of ["h1:has-text('digits')", ".end", "figure canvas", ".happened tbody tr"]) await again.locator(wanted).first().waitFor();
  check((await again.locator("nav a:has-text('Fleet')").count()) === 0, "there is no fleet");
  for (const width of [1280, 390]) {
    await again.setViewportSize({ width, height: 900 });
    check((await beyond(again)) <= 0, "the document is wider than the window, at " + width);
    await again.screenshot({ path: scratch + "/out/recorded-" + width + ".png", fullPage: true });
  }
  found.push(...(await audit(again)));
  await again.context().close();
  dashboard.child.kill("SIGINT");
  check(found.length === 0, found.join("\n  "));
  say("`paraft dashboard` shows it from its record");

  [0, 1, 2, 3].forEach(startServer);
  await run("status", "--fleet", servers, "--wait", "whole", "--timeout", "60");
  for (const job of ["digits", "other"]) train(job);
  let page = await open(browser, address(0));
  await live(page);
  const id = await until("the job's number", async () => String((await jobOf("digits")).number));
  const view = (name) => (name === "job" ? "job/" + id : name);

  // ---- who is let in ----
  check(!page.url().includes("token") && page.url().endsWith("/"), "the token stays in the address bar: " + page.url());
  const secrets = await page.evaluate(() => JSON.stringify(localStorage) + document.cookie + document.documentElement.outerHTML);
  check(!secrets.includes(TOKEN), "the token is kept where others see it");
  for (const [what, hash] of [["no token", ""], ["a wrong token", "#token=" + TOKEN.replace("0", "1")]]) {
    const stranger = await open(browser, "http://" + pages[0] + "/" + hash);
    await until("the refusal", async () => (await stranger.textContent("#state")).includes("not let in"));
    check((await stranger.locator("main table, main figure, nav a").count()) === 0, "with " + what + " something is shown");
    check(!(await stranger.innerText("body")).includes("digits"), "with " + what + " a job is named");
    await stranger.context().close();
  }
  await until("the log of the refusals", () => ["it showed no token", "it showed a wrong token"].every((why) => fleet[0].read().includes(why)));
  say("the token leaves the address bar; without it, and with a wrong one, nothing is shown, and the log says so");

  // ---- a page of another site ----
  const strangers = createServer((_, answer) => answer.setHeader("content-type", "text/html").end("<h1>elsewhere</h1>")).listen(strangerPort, "127.0.0.1");
  const elsewhere = await page.context().newPage();
  await elsewhere.goto("http://127.0.0.1:" + strangerPort + "/elsewhere");
  const before = await modes("digits");
  const asked = elsewhere.waitForResponse((r) => r.url().endsWith("/act") && r.request().method() === "POST");
  await elsewhere.evaluate((to) => fetch(to, { method: "POST", mode: "no-cors", body: JSON.stringify({ act: "mode", job: "digits", mode: "asp" }) }), "http://" + pages[0] + "/act");
  check((await asked).status() === 403, "a page of another site gets " + (await asked).status());
  // Nor with the token: a browser asks first whether such a page may show one.
  const shown = await elsewhere.evaluate(([to, token]) => fetch(to, { method: "POST", headers: { authorization: "Bearer " + token }, body: JSON.stringify({ act: "mode", job: "digits", mode: "asp" }) })
    .then((r) => "answered " + r.status, (e) => "refused"), ["http://" + pages[0] + "/act", TOKEN]);
  check(shown === "refused", "a page of another site with the token is " + shown);
  await until("the log of the other site", () => fleet[0].read().includes("it was asked by a page of another site"));
  check(JSON.stringify(await modes("digits")) === JSON.stringify(before), "a page of another site has switched the mode");
  await elsewhere.close();
  strangers.close();
  say("a page of another site is refused with 403, and the log says so");

  // ---- each view: what it has, to whom, how wide ----
  await until("points of both jobs", async () => {
    await go(page, "compare", []);
    return (await page.locator("figure canvas").count()) > 4;
  });
  const faults = [];
  for (const theme of ["light", "dark"]) {
    for (const width of [1280, 390]) {
      const seen = await open(browser, address(0, "/?theme=" + theme), { width });
      await live(seen);
      for (const name of Object.keys(VIEWS)) {
        await go(seen, view(name), VIEWS[name]);
        await seen.evaluate(() => scrollTo(0, 0));
        await seen.screenshot({ path: scratch + "/out/" + [name, theme, width].join("-") + ".png", fullPage: true });
        const where = name + ", " + theme + ", " + width + " pixels: ";
        faults.push(...(await audit(seen)).map((v) => where + v));
        const wide = await beyond(seen);
        if (wide > 0) faults.push(where + "the document is " + wide + " pixels wider than the window");
      }
      await go(seen, "fleet", VIEWS.fleet);
      await seen.click("text=drain >> nth=0");
      await seen.screenshot({ path: scratch + "/out/" + ["dialog", theme, width].join("-") + ".png" });
      faults.push(...(await audit(seen)).map((v) => "dialog, " + theme + ", " + width + " pixels: " + v));
      await seen.context().close();
    }
  }
  check(faults.length === 0, faults.join("\n  "));
  say("three views and a dialog in light and dark at 1280 and 390 pixels: nothing serious for axe, nothing wider than the window");

  // ---- actions ----
  await go(page, view("job"), VIEWS.job);
  await page.selectOption("select[aria-label=Mode]", "asp");
  await page.click("text=switch mode");
  await page.locator("dialog#ask[open]").waitFor();
  await page.click("dialog >> text=Leave it");
  await page.keyboard.press("Tab");
  await page.click("text=switch mode");
  await page.keyboard.press("Escape");
  check((await page.locator("dialog[open]").count()) === 0, "Escape leaves the dialog open");
  await page.click("text=stop");
  await page.click("dialog >> text=Leave it");
  check(await isIn("bsp")(), "after `Leave it` the mode is " + (await modes("digits")));
  check((await jobOf("digits")).stopping === false, "after `Leave it` the job is to stop");
  check(![0, 1, 2, 3].some((i) => /(?<!refused )on the dashboard: /.test(fleet[i].read())), "`Leave it` has asked a server");
  say("`Leave it` and Escape: nothing is done");

  await page.selectOption("select[aria-label=Mode]", "asp");
  await page.click("text=switch mode");
  check((await yes(page, "from bsp to asp")).includes("digits continues in asp"), "switched: " + (await page.textContent("#said")));
  await until("asp on every shard", isIn("asp"));
  await until("the page to say so", async () => (await page.textContent(".facts")).includes("asp"));
  await until("the event", async () => (await page.locator(".events li").allTextContents()).some((t) => t.includes("digits continues in asp") && t.includes("127.0.0.1")));
  await until("the command to switch back", () => run("mode", "digits", "bsp", "--fleet", servers).then(() => true));
  await until("bsp on the page", async () => /mode\s*bsp/.test(await page.textContent(".facts")));
  say("switch mode: as `paraft mode`");

  // By the keyboard alone: from the top of the page to the button, past everything that redraws itself meanwhile.
  await page.evaluate(() => { document.activeElement.blur(); scrollTo(0, 0); });
  const focused = () => page.evaluate(() => (document.activeElement.tagName === "SELECT" ? "select" : document.activeElement.textContent.trim()));
  const tabTo = async (what) => {
    for (let i = 0; i < 60; i++) {
      await page.keyboard.press("Tab");
      if ((await focused()) === what) return;
    }
    throw new Error("the keyboard does not reach " + what);
  };
  await tabTo("select");
  await page.keyboard.type("ssp:4");
  await tabTo("switch mode");
  const at = await page.textContent(".facts");
  await until("the page to redraw itself", async () => (await page.textContent(".facts")) !== at);
  check((await focused()) === "switch mode", "the focus is lost when the page redraws itself: it is on `" + (await focused()) + "`");
  await page.keyboard.press("Enter");
  await page.locator("dialog#ask[open]").waitFor();
  await tabTo("Switch");
  await page.keyboard.press("Enter");
  await until("ssp:4 on every shard", isIn("ssp:4"));
  say("switch mode by the keyboard alone; the focus stays while the page redraws itself");

  await go(page, "fleet", VIEWS.fleet);
  const drain = page.locator(".scroll[aria-label=Servers] tbody tr", { hasText: "s3" }).locator("button");
  const s3 = async () => (await status()).servers.find((s) => s.server === 3);
  await drain.click();
  check((await yes(page, "Empty s3?")).includes("s3 is emptied"), "drained: " + (await page.textContent("#said")));
  await until("s3 to be empty", async () => { const s = await s3(); return s.state === "draining" && s.replicas === 0 && s.leads === 0; });
  await until("the button to fill it", async () => (await drain.textContent()) === "fill again");
  await drain.click();
  await yes(page, "Fill s3 again?");
  await until("s3 to be up, with replicas", async () => { const s = await s3(); return s.state === "up" && s.replicas > 0; });
  await until("the button to drain it", async () => (await drain.textContent()) === "drain");
  say("drain, fill again: as `paraft drain`");

  // ---- behind a proxy that adds a path; what it serves streams ----
  const proxy = createServer((from, to) => {
    if (!from.url.startsWith("/fleet/")) return void to.writeHead(404).end();
    const headers = { ...from.headers, host: pages[1], "x-forwarded-host": from.headers.host };
    const up = request({ host: "127.0.0.1", port: d1, path: from.url.slice("/fleet".length), method: from.method, headers }, (answer) => {
      to.writeHead(answer.statusCode, answer.headers);
      to.flushHeaders();
      answer.pipe(to);
    });
    up.on("error", () => to.destroy());
    to.on("close", () => up.destroy());
    from.pipe(up);
  }).listen(proxyPort, "127.0.0.1");
  const behind = await open(browser, "http://127.0.0.1:" + proxyPort + "/fleet/#token=" + TOKEN);
  await live(behind);
  check(behind.url() === "http://127.0.0.1:" + proxyPort + "/fleet/", "behind a proxy the address is " + behind.url());
  await go(behind, view("job"), VIEWS.job);
  const then = await behind.textContent(".facts");
  await until("the page behind the proxy to go on", async () => (await behind.textContent(".facts")) !== then);
  await behind.selectOption("select[aria-label=Mode]", "asp");
  await behind.click("text=switch mode");
  await yes(behind, "to asp");
  await until("asp on every shard", isIn("asp"));
  await behind.context().close();
  proxy.closeAllConnections();
  proxy.close();
  say("behind a proxy with a path: it renders, goes on and acts");

  // ---- the server that serves the page hangs ----
  const moved = (from) => until("another server to serve the page", async () => {
    const said = (await page.textContent("#state")).replace("live, from ", "");
    return pages.includes(said) && said !== from && said;
  });
  await go(page, view("job"), VIEWS.job);
  const hangs = pages.findIndex((p) => page.url().startsWith("http://" + p + "/"));
  const stopped = Date.now();
  fleet[hangs].child.kill("SIGSTOP");
  await until("the page to doubt its server", async () => (await page.textContent("#state")).includes("has said nothing for 2 s"));
  const doubted = Date.now();
  await moved(pages[hangs]);
  say("the server of the page hung; the page doubted it after " + ((doubted - stopped) / 1000).toFixed(1) + " s, and another one served it after " + ((Date.now() - stopped) / 1000).toFixed(1) + " s");
  fleet[hangs].child.kill("SIGCONT");
  await run("status", "--fleet", servers, "--wait", "whole", "--timeout", "90");

  // ---- the server that serves the page dies ----
  const victim = (await until("a leader of shard 0", async () => (await status()).placement.find((s) => s.job === Number(id) && s.shard === 0 && s.leader != null))).leader;
  await page.context().close();
  page = await open(browser, address(victim));
  await live(page);
  await go(page, view("job"), VIEWS.job);
  // The others have looked at the fleet once since it was whole.
  await until("the other servers to look", async () => (await page.locator("#state").textContent()).includes(pages[victim]));
  await Promise.all(pages.filter((_, i) => i !== victim).map((p) => until("s" + p, async () => {
    const answer = await fetch("http://" + p + "/live", { headers: { authorization: "Bearer " + TOKEN } }), reader = answer.body.getReader();
    let text = "";
    while (!text.includes("\n\n")) text += new TextDecoder().decode((await reader.read()).value);
    await reader.cancel();
    const facts = JSON.parse(/data: (.*)/.exec(text)[1]).facts;
    return facts.servers.every((s) => s.state === "up") && facts.shards.every((s) => s.leader != null);
  })));
  const killed = Date.now();
  fleet[victim].child.kill("SIGKILL");
  const other = await moved(pages[victim]);
  say("the server of the page was killed; " + ((Date.now() - killed) / 1000).toFixed(1) + " s later another one serves it");
  check(page.url().startsWith("http://" + other + "/") && page.url().endsWith("#job/" + id) && !page.url().includes("token"), "the address is " + page.url());
  await go(page, view("job"), VIEWS.job);
  const events = await until("the kill and the elections", async () => {
    const all = (await page.locator(".events li").allTextContents()).reverse();
    const died = all.findIndex((t) => t.includes("server") && t.includes("s" + victim + " is ") && /silent|unreachable/.test(t));
    const elected = all.findIndex((t) => t.includes("election") && t.includes("leads shard 0 of digits") && !t.includes("s" + victim + " leads"));
    return died >= 0 && elected >= 0 && [died, elected];
  });
  check(events.length === 2, "");
  say("the kill and the election after it are among its events");
  startServer(victim);
  await run("status", "--fleet", servers, "--wait", "whole", "--timeout", "90");
  await go(page, "fleet", VIEWS.fleet);
  await until("it to be back", async () => (await page.locator(".scroll[aria-label=Servers] tbody tr", { hasText: "s" + victim }).textContent()).includes("up"));
  say("it is back, on the page too");

  // ---- the end of a job ----
  await go(page, view("job"), VIEWS.job);
  await page.click("main >> text=stop");
  await yes(page, "Stop digits?");
  await until("digits to be stopped", async () => (await jobOf("digits")).state === "stopped");
  await page.locator("button:text-is('delete')").waitFor();
  await run("stop", "other", "--fleet", servers, "--wait", "60");
  const states = (await status()).jobs.map((j) => j.state);
  check(states.every((s) => s === "stopped"), "the page's stop and the command's: " + states);
  await page.click("button:text-is('delete')");
  await yes(page, "Delete digits?");
  await until("digits to be gone", async () => !(await status()).jobs.some((j) => j.job === "digits"));
  await page.locator("h1:has-text('No such job')").waitFor();
  await until("other to be deleted by the command", () => run("delete", "other", "--fleet", servers).then(() => true));
  await go(page, "fleet", ["text=This fleet has no jobs."]);
  say("stop, delete: as `paraft stop`, `paraft delete`");
});
