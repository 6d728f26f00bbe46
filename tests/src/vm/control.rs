// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest's end of the control channel: runs the host's commands, and reports their output and end.
//!
//! Several commands run at once, each in its own process group. Nothing is held back: output is read
//! no faster than the host takes it, so a command with too much output waits.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use super::wire::{Ask, MAX_LINE, Report, Request, Start, What};

/// Bytes of output in one line.
const CHUNK: usize = 16 << 10;
/// How long output of a command's own children is waited for when the command has ended.
const AFTERMATH: Duration = Duration::from_secs(1);

/// Serves the channel at `port` until the host closes the port.
///
/// # Errors
/// If the port cannot be opened, or fails.
pub fn serve(port: &Path) -> io::Result<()> {
    let file = OpenOptions::new().read(true).write(true).open(port)?;
    wait_for_host(&file)?;
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let server = Arc::new(Server::new(file.try_clone()?));
    // Ends an unfinished line of an earlier life of this guest.
    (&server.port).write_all(b"\n")?;
    server.say(0, What::Ready(name));
    server.listen(BufReader::new(file))
}

/// Waits for the host to open its end: before, a read of the port would report end of file.
fn wait_for_host(port: &File) -> io::Result<()> {
    loop {
        let mut fds = [PollFd::new(port, PollFlags::OUT)];
        poll(&mut fds, None)?;
        if !fds[0].revents().contains(PollFlags::HUP) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
}

struct Running {
    group: Pid,
    stdin: Option<Sender<String>>,
}

struct Server {
    port: File,
    // One line at a time.
    line: Mutex<()>,
    running: Mutex<HashMap<u64, Running>>,
}

impl Server {
    fn new(port: File) -> Server {
        Server { port, line: Mutex::default(), running: Mutex::default() }
    }

    fn running(&self) -> MutexGuard<'_, HashMap<u64, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, id: u64, what: What) {
        let mut text = serde_json::to_vec(&Report { id, what }).unwrap_or_default();
        text.push(b'\n');
        let _turn = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        // The reader notices a lost host.
        let _ = (&self.port).write_all(&text);
    }

    fn listen(self: &Arc<Server>, mut lines: impl BufRead) -> io::Result<()> {
        let mut line = Vec::new();
        loop {
            line.clear();
            let len = lines.by_ref().take(MAX_LINE as u64).read_until(b'\n', &mut line)?;
            if len == 0 {
                return Ok(());
            }
            // An invalid line was meant for an earlier life of this guest.
            if let Ok(request) = serde_json::from_slice(&line) {
                self.obey(request);
            }
        }
    }

    fn obey(self: &Arc<Server>, Request { id, ask }: Request) {
        match ask {
            Ask::Run(start) => {
                if let Err(error) = self.start(id, &start) {
                    let program = start.run.first().map_or("", String::as_str);
                    self.say(id, What::Err(format!("cannot start {program:?}: {error}\n")));
                    self.say(id, What::Exit(127));
                }
            }
            Ask::Kill { kill } => {
                // Under the lock, so the group cannot have been reaped.
                if let Some(job) = self.running().get(&id)
                    && let Some(signal) = Signal::from_named_raw(kill)
                {
                    let _ = kill_process_group(job.group, signal);
                }
            }
            Ask::Feed { feed } => {
                if let Some(stdin) = self.running().get(&id).and_then(|job| job.stdin.as_ref()) {
                    let _ = stdin.send(feed);
                }
            }
            Ask::Eof { eof } => {
                if eof && let Some(job) = self.running().get_mut(&id) {
                    job.stdin = None;
                }
            }
        }
    }

    fn start(self: &Arc<Server>, id: u64, start: &Start) -> io::Result<()> {
        let (program, args) =
            start.run.split_first().ok_or_else(|| io::Error::other("no program"))?;
        let piped = start.open || start.stdin.is_some();
        let mut child = Command::new(program)
            .args(args)
            .envs(&start.env)
            .stdin(if piped { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let group = Pid::from_child(&child);
        let stdin = child.stdin.take().map(|stdin| {
            let (sender, texts) = channel();
            thread::spawn(move || feed(stdin, &texts));
            if let Some(text) = &start.stdin {
                let _ = sender.send(text.clone());
            }
            sender
        });
        let stdin = stdin.filter(|_| start.open);
        self.running().insert(id, Running { group, stdin });
        // Closed when the last of the two has read to the end.
        let (open, ended) = channel();
        if let Some(out) = child.stdout.take() {
            self.stream(id, out, What::Out, open.clone());
        }
        if let Some(err) = child.stderr.take() {
            self.stream(id, err, What::Err, open);
        }
        let server = Arc::clone(self);
        thread::spawn(move || server.reap(id, child, &ended));
        Ok(())
    }

    fn stream(
        self: &Arc<Server>,
        id: u64,
        mut from: impl Read + Send + 'static,
        kind: fn(String) -> What,
        open: Sender<()>,
    ) {
        let server = Arc::clone(self);
        thread::spawn(move || {
            let (mut text, mut chunk) = (Lossy::default(), vec![0; CHUNK]);
            while let Ok(len @ 1..) = from.read(&mut chunk) {
                let ready = text.push(&chunk[..len]);
                if !ready.is_empty() {
                    server.say(id, kind(ready));
                }
            }
            let rest = text.finish();
            if !rest.is_empty() {
                server.say(id, kind(rest));
            }
            drop(open);
        });
    }

    fn reap(&self, id: u64, mut child: Child, ended: &Receiver<()>) {
        // The process number stays taken until its removal from the table.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        let _ = waitid(WaitId::Pid(Pid::from_child(&child)), options);
        self.running().remove(&id);
        let status = child.wait();
        // Background processes of the command may hold its output open for ever.
        let _: Result<(), RecvTimeoutError> = ended.recv_timeout(AFTERMATH);
        self.say(
            id,
            match status {
                Ok(status) => match (status.code(), status.signal()) {
                    (Some(code), _) => What::Exit(code),
                    (None, signal) => What::Signal(signal.unwrap_or_default()),
                },
                Err(_) => What::Exit(127),
            },
        );
    }
}

fn feed(mut stdin: ChildStdin, texts: &Receiver<String>) {
    for text in texts {
        if stdin.write_all(text.as_bytes()).and_then(|()| stdin.flush()).is_err() {
            return;
        }
    }
}

/// Text from bytes in pieces. A character may be cut in two, and invalid UTF-8 becomes replacement
/// characters.
#[derive(Default)]
struct Lossy {
    // The beginning of a character, at most three bytes.
    held: Vec<u8>,
}

impl Lossy {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let cut = match std::str::from_utf8(&self.held) {
            Ok(_) => self.held.len(),
            // No error length: the end came in the middle of a character.
            Err(_) => self.held.len() - self.unfinished(),
        };
        let rest = self.held.split_off(cut);
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held = rest;
        text
    }

    /// How many bytes at the end may be the beginning of a character.
    fn unfinished(&self) -> usize {
        let last = self.held.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
        match std::str::from_utf8(last) {
            Err(error) if error.error_len().is_none() => last.len(),
            _ => 0,
        }
    }

    fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    /// A server on one end of a socket pair; the other end.
    fn serve_a_pair() -> UnixStream {
        let (here, there) = UnixStream::pair().unwrap();
        let server = Arc::new(Server::new(File::from(OwnedFd::from(there.try_clone().unwrap()))));
        thread::spawn(move || server.listen(BufReader::new(there)));
        here.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        here
    }

    fn ask(mut host: &UnixStream, line: &str) {
        host.write_all(line.as_bytes()).unwrap();
        host.write_all(b"\n").unwrap();
    }

    /// The whole output and the end of each of `ids`.
    fn ends(host: &UnixStream, ids: &[u64]) -> HashMap<u64, (String, String, What)> {
        let mut texts: HashMap<u64, (String, String)> = HashMap::new();
        let mut done = HashMap::new();
        let mut lines = BufReader::new(host).lines();
        while done.len() < ids.len() {
            let report: Report = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
            let text = texts.entry(report.id).or_default();
            match report.what {
                What::Out(out) => text.0 += &out,
                What::Err(err) => text.1 += &err,
                end => {
                    done.insert(report.id, (text.0.clone(), text.1.clone(), end));
                }
            }
        }
        done
    }

    #[test]
    fn output_error_and_code_come_apart() {
        let host = serve_a_pair();
        ask(&host, r#"{"id":1,"run":["sh","-c","echo out; echo err >&2; exit 3"]}"#);
        let ends = ends(&host, &[1]);
        assert_eq!(ends[&1], ("out\n".into(), "err\n".into(), What::Exit(3)));
    }

    #[test]
    fn environment_and_standard_input_arrive() {
        let host = serve_a_pair();
        ask(
            &host,
            r#"{"id":1,"run":["sh","-c","echo $X; cat"],"env":{"X":"y"},"stdin":"in\nput"}"#,
        );
        assert_eq!(ends(&host, &[1])[&1].0, "y\nin\nput");
    }

    #[test]
    fn an_open_input_takes_more_until_its_end() {
        let host = serve_a_pair();
        ask(&host, r#"{"id":1,"run":["cat"],"open":true}"#);
        ask(&host, r#"{"id":1,"feed":"one "}"#);
        ask(&host, r#"{"id":1,"feed":"two"}"#);
        ask(&host, r#"{"id":1,"eof":true}"#);
        assert_eq!(ends(&host, &[1])[&1].0, "one two");
    }

    #[test]
    fn commands_run_side_by_side_and_can_be_killed() {
        let host = serve_a_pair();
        ask(&host, r#"{"id":1,"run":["sh","-c","sleep 100 & wait"]}"#);
        ask(&host, r#"{"id":2,"run":["true"]}"#);
        assert_eq!(ends(&host, &[2])[&2].2, What::Exit(0));
        ask(&host, r#"{"id":1,"kill":9}"#);
        assert_eq!(ends(&host, &[1])[&1].2, What::Signal(9));
    }

    #[test]
    fn a_program_that_does_not_exist_is_reported() {
        let host = serve_a_pair();
        ask(&host, r#"{"id":1,"run":["/no/such/program"]}"#);
        let ends = ends(&host, &[1]);
        assert_eq!(ends[&1].2, What::Exit(127));
        assert!(ends[&1].1.contains("/no/such/program"), "{}", ends[&1].1);
    }

    #[test]
    fn what_a_command_leaves_behind_does_not_hold_its_end() {
        let host = serve_a_pair();
        ask(&host, r#"{"id":1,"run":["sh","-c","sleep 20 & exit 4"]}"#);
        assert_eq!(ends(&host, &[1])[&1].2, What::Exit(4));
    }

    #[test]
    fn nonsense_is_passed_over() {
        let host = serve_a_pair();
        for bad in ["{\"id\":", "\u{1}", "[]", "{\"id\":9,\"kill\":9}", "{\"id\":1,\"run\":[]}"] {
            ask(&host, bad);
        }
        assert_eq!(ends(&host, &[1])[&1].2, What::Exit(127));
    }

    #[test]
    fn text_survives_any_cut() {
        let text = "aé€😀z".as_bytes();
        for cut in 0..text.len() {
            let mut lossy = Lossy::default();
            let mut all = lossy.push(&text[..cut]);
            all += &lossy.push(&text[cut..]);
            all += &lossy.finish();
            assert_eq!(all, "aé€😀z", "cut at {cut}");
        }
    }

    #[test]
    fn what_is_no_text_is_replaced_and_never_held_back() {
        let mut lossy = Lossy::default();
        assert_eq!(lossy.push(b"a\xff"), "a\u{fffd}");
        assert_eq!(lossy.push(&[0xc3; 5]), "\u{fffd}".repeat(4));
        assert_eq!(lossy.held.len(), 1);
        assert_eq!(lossy.finish(), "\u{fffd}");
    }
}
