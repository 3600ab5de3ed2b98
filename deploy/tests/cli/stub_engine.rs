//! An inference engine as far as a feed sees it: its routes for weights, its label, whether it is paused. It fails as a test
//! says, and notes what a feed must never do.

use crate::common::*;
use serde_json::json;
use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::{Arc, Mutex, MutexGuard},
};

/// What an engine does in place of an answer.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    /// It answers this, whatever was asked.
    Says(u16, &'static str),
    /// It does not answer before the feed gives up.
    Hangs,
    /// It closes this connection and so many after it, and is a new process then.
    Dies(u32),
    /// It sends what is no HTTP.
    Garbage,
    /// It says that it has done it, and has not.
    Lies,
}

#[derive(Default)]
pub struct Seen {
    /// Paths in the order of the calls, queries included.
    pub calls: Vec<String>,
    pub label: String,
    pub paused: bool,
    /// Some of its weights may be of another version.
    pub half: bool,
    pub wrong: Vec<String>,
    faults: VecDeque<(&'static str, Fault)>,
    dead: u32,
    initialised: bool,
    /// vLLM: an update has been started, and neither finished nor failed.
    open: bool,
    /// It has no /model_info, as old servers of SGLang.
    pub old: bool,
}

#[derive(Clone)]
pub struct Stub {
    pub url: String,
    seen: Arc<Mutex<Seen>>,
}

impl Stub {
    /// An engine that fails at these paths, one after the other.
    pub fn start(faults: &[(&'static str, Fault)]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let seen =
            Seen { label: "default".into(), faults: faults.iter().copied().collect(), ..Seen::default() };
        let stub = Self { url, seen: Arc::new(Mutex::new(seen)) };
        let serving = stub.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let stub = serving.clone();
                // A feed that gave up is gone.
                std::thread::spawn(move || drop(stub.serve(stream)));
            }
        });
        stub
    }

    pub fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().expect("no stub panicked")
    }

    fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let path = line.split(' ').nth(1).unwrap_or_default().to_string();
        let mut length = 0;
        loop {
            let mut header = String::new();
            reader.read_line(&mut header)?;
            let header = header.trim().to_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let Some((status, answer)) = self.answer(&path, &body, &mut stream)? else { return Ok(()) };
        // It closes the connection and does not say so, as vLLM behind an error.
        let head = "Content-Type: application/json";
        write!(stream, "HTTP/1.1 {status} Said\r\n{head}\r\nContent-Length: {}\r\n\r\n{answer}", answer.len())
    }

    fn answer(
        &self,
        path: &str,
        body: &Value,
        stream: &mut TcpStream,
    ) -> std::io::Result<Option<(u16, String)>> {
        let route = path.split('?').next().unwrap_or_default().to_string();
        let fault = {
            let mut seen = self.seen();
            if seen.dead > 0 {
                seen.dead -= 1;
                return Ok(None);
            }
            seen.calls.push(path.into());
            match seen.faults.front() {
                Some((at, _)) if *at == route => seen.faults.pop_front().map(|(_, fault)| fault),
                _ => None,
            }
        };
        let loads =
            ["/update_weights_from_disk", "/start_weight_update", "/update_weights", "/finish_weight_update"];
        if fault.is_some() && loads.contains(&route.as_str()) {
            self.seen().half = true;
        }
        if fault.is_some() && route == "/update_weights" {
            self.seen().open = false;
        }
        match fault {
            None => {}
            Some(Fault::Says(status, text)) => return Ok(Some((status, text.into()))),
            Some(Fault::Lies) => return Ok(Some((200, json!({ "success": true }).to_string()))),
            Some(Fault::Garbage) => return stream.write_all(b"\x16\x03\x01 what?\n").map(|()| None),
            Some(Fault::Dies(more)) => {
                let mut seen = self.seen();
                // The weights of a new process are those of its disk.
                (seen.dead, seen.half) = (more, false);
                (seen.label, seen.paused, seen.initialised) = ("default".into(), false, false);
                seen.open = false;
                return Ok(None);
            }
            Some(Fault::Hangs) => {
                // Until the other side closes it.
                let _ = stream.read(&mut [0; 1]);
                return Ok(None);
            }
        }
        Ok(Some(self.obey(&route, body)))
    }

    fn obey(&self, route: &str, body: &Value) -> (u16, String) {
        let mut seen = self.seen();
        let label = |body: &Value| body["weight_version"].as_str().unwrap_or_default().to_string();
        let done = json!({ "message": "done", "success": true }).to_string();
        match route {
            "/pause_generation" | "/pause" => seen.paused = true,
            "/continue_generation" | "/resume" => {
                if seen.half {
                    seen.wrong.push("resumed while it may be half loaded".into());
                }
                seen.paused = false;
            }
            "/flush_cache" if !seen.paused => return (400, "there are requests".into()),
            "/flush_cache" => return (200, "Cache flushed.\n".into()),
            "/update_weights_from_disk" => {
                let folder = PathBuf::from(body["model_path"].as_str().unwrap_or_default());
                if !seen.paused || body["flush_cache"] != true {
                    seen.wrong.push(format!("loaded while it works: {body}"));
                }
                if let Err(why) = check(&folder.join("model.safetensors"), &label(body)) {
                    seen.wrong.push(why);
                }
                (seen.label, seen.half) = (label(body), false);
            }
            "/init_weight_transfer_engine" => {
                let init = &body["init_info"];
                if init["job"] != "t" || init["dtype"] != "bf16" || !init["servers"].is_array() {
                    seen.wrong.push(format!("{body}"));
                }
                seen.initialised = true;
            }
            // vLLM begins no second update; one ends when it is finished, or when an order to load fails.
            "/start_weight_update" if seen.open => return (500, "an update is already active".into()),
            "/start_weight_update" if seen.initialised && seen.paused => {
                (seen.half, seen.open) = (true, true)
            }
            "/update_weights" if body["update_info"]["file"].is_null() => {
                seen.open = false;
                return (500, "Invalid update_info".into());
            }
            "/update_weights" if seen.open => {
                let info = &body["update_info"];
                let file = PathBuf::from(info["file"].as_str().unwrap_or_default());
                if let Err(why) = check(&file, info["version"].as_str().unwrap_or_default()) {
                    seen.wrong.push(why);
                }
            }
            "/finish_weight_update" if seen.open => {
                (seen.label, seen.half, seen.open) = (label(body), false, false);
            }
            "/model_info" if seen.old => return (404, json!({ "detail": "Not Found" }).to_string()),
            "/model_info" | "/get_weight_version" | "/weight_info" => {
                return (200, json!({ "weight_version": seen.label }).to_string());
            }
            other => {
                seen.wrong.push(format!("{other} at the wrong moment"));
                return (409, "not now".into());
            }
        }
        (200, done)
    }
}

/// The file is whole, and says that it is this version.
fn check(path: &Path, version: &str) -> Result<(), String> {
    let file = fs::read(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let header = u64::from_le_bytes(file[..8].try_into().expect("8 bytes")) as usize;
    let json: Value = serde_json::from_slice(&file[8..8 + header]).map_err(|e| e.to_string())?;
    let ends = json.as_object().into_iter().flatten().filter_map(|(_, v)| v["data_offsets"][1].as_u64());
    let whole = ends.max().unwrap_or(0) as usize + 8 + header == file.len();
    match whole && json["__metadata__"]["version"] == version && path.with_file_name("config.json").is_file()
    {
        true => Ok(()),
        false => Err(format!("{}: not version {version}, or not whole", path.display())),
    }
}
