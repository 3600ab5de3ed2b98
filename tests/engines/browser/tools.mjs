// What both parts share: the fleet's processes, pages in the browser, and waiting for what is to come.
import { spawn, execFile } from "node:child_process";
import { closeSync, openSync, readFileSync } from "node:fs";
import { createServer } from "node:net";
import { createRequire } from "node:module";
import { promisify } from "node:util";
import { chromium } from "playwright-core";

export const [, , paraft, scratch] = process.argv;
export const TOKEN = "0123456789abcdef0123456789abcdef";
const began = Date.now();
export const say = (text) => console.log(String(Math.round((Date.now() - began) / 1000)).padStart(4) + " s  " + text);
export const check = (is, what) => {
  if (!is) throw new Error(what);
};
const PATIENCE = 90000;

/// Waits until `test` gives something that is true, and gives that.
export const until = async (what, test) => {
  const deadline = Date.now() + PATIENCE;
  let last;
  while (Date.now() < deadline) {
    try {
      const got = await test();
      if (got) return got;
      last = "not so yet";
    } catch (e) {
      last = e.message;
    }
    await new Promise((on) => setTimeout(on, 50));
  }
  throw new Error("gave up waiting for " + what + ": " + last);
};

/// Below those that the system gives to connections that go out, which could take one of them meanwhile.
export const freePorts = async (n) => {
  const ports = [];
  let next = 20000 + Math.floor(Math.random() * 10000);
  while (ports.length < n) {
    const port = next++;
    const is = await new Promise((on) => {
      const s = createServer().once("error", () => on(false)).listen(port, "127.0.0.1", () => s.close(() => on(true)));
    });
    if (is) ports.push(port);
  }
  return ports;
};

/// A process of paraft's; what it says on either stream is in `log`.
export const start = (name, args, env = {}) => {
  const log = scratch + "/" + name + ".log", to = openSync(log, "a");
  const child = spawn(paraft, args, { stdio: ["ignore", to, to], env: { ...process.env, PARAFT_DASHBOARD_TOKEN: TOKEN, ...env }, cwd: scratch });
  closeSync(to);
  const ended = new Promise((on) => child.on("exit", (code) => on(code)));
  return { child, ended, log, read: () => readFileSync(log, "utf8") };
};

export const run = async (...args) => (await promisify(execFile)(paraft, args, { maxBuffer: 1 << 26 })).stdout;

export const launch = async () => {
  const browser = await chromium.launch({
    executablePath: "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
  });
  browser.errors = [];
  return browser;
};

/// A page of its own; an exception in it fails the suite at the end.
export const open = async (browser, address, { width = 1280, height = 900 } = {}) => {
  const context = await browser.newContext({ viewport: { width, height } });
  const page = await context.newPage();
  page.on("pageerror", (e) => browser.errors.push(e.message));
  if (address) await page.goto(address);
  return page;
};

/// Goes to a view, and waits for what it has to show.
export const go = async (page, view, wanted) => {
  await page.evaluate((v) => { location.hash = v; }, view);
  for (const w of wanted) await page.locator(w).first().waitFor({ timeout: PATIENCE });
};

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/// What axe finds against it, that is serious.
export const audit = async (page) => {
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  const bad = violations.filter((v) => ["serious", "critical"].includes(v.impact));
  return bad.map((v) => v.id + ": " + v.nodes.slice(0, 3).map((n) => n.target.join(" ") + " (" + n.failureSummary.replace(/\s+/g, " ") + ")").join("; "));
};

/// How far the document is wider than the window.
export const beyond = (page) => page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);

export const main = async (body) => {
  let code = 0;
  const browser = await launch();
  try {
    await body(browser);
    check(browser.errors.length === 0, "exceptions in the page: " + browser.errors.join("; "));
  } catch (e) {
    say("FAILED: " + (e.stack || e));
    code = 1;
  }
  await browser.close();
  process.exit(code);
};
