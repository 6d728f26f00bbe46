//! The two processes of the demo.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use guest_driver::{Config, ConnectionInfo, Stack};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::exchange::{self, BLOCK, Exchange, Summary};
use crate::error::CliError;
use crate::helper;
use crate::stack;
use crate::transport::{Path, Smc, Tcp, Transport};

/// What a process of the demo has to do.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Task {
    /// Serve one SMC and one TCP connection.
    Server { device: PathBuf },
    /// Send the data over both.
    Client { device: PathBuf, smc: String, tcp: String, source: Source },
}

/// What is sent.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Source {
    /// A file.
    File(PathBuf),
    /// So many bytes made up on the way.
    Generated(u64),
}

/// What the processes say.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Said {
    /// The server listens.
    Listening { gid: String, smc: String, tcp: String },
    /// The client's device is open.
    Opened { gid: String },
    /// The client has an SMC connection.
    Connected { window: bool, micros: u64 },
    /// So much has gone there and back over both connections, bytes.
    Progress(u64),
    /// Everything was sent and came back.
    Done { bytes: u64, sent: String, smc: Summary, tcp: Summary },
}

/// A process of the demo.
pub(crate) fn run(task: &str) -> ExitCode {
    helper::run(task, |task: Task| match task {
        Task::Server { device } => serve(&device),
        Task::Client { device, smc, tcp, source } => {
            let source = source.open()?;
            send(&device, &smc, &tcp, source)
        }
    })
}

fn say(said: Said) -> Result<(), CliError> {
    helper::say(&said).map_err(CliError::io("report"))
}

/// Until the process that started this one has seen enough: the daemon's counters are those of open
/// devices.
fn stay() -> ! {
    loop {
        std::thread::park();
    }
}

fn open(device: &PathBuf) -> Result<(Smc, String), CliError> {
    // The largest buffer: this is about bulk data.
    let config = Config { recv_buffer: 1 << 20, ..Config::new(device) };
    let stack = stack::open(config, device)?;
    let gid = first_gid(&stack);
    Ok((Smc::new(stack, Path::Any), gid))
}

fn first_gid(stack: &std::sync::Arc<Stack>) -> String {
    stack.devices().first().map(|(_, gid)| gid.to_string()).unwrap_or_default()
}

fn serve(device: &PathBuf) -> Result<(), CliError> {
    let (smc, gid) = open(device)?;
    let (listener, smc_address) = smc.listen().map_err(CliError::io("listen"))?;
    let (tcp_listener, tcp_address) = Tcp::LOOPBACK.listen().map_err(CliError::io("listen"))?;
    say(Said::Listening { gid, smc: smc_address, tcp: tcp_address })?;
    std::thread::scope(|scope| {
        let tcp = scope.spawn(|| exchange::serve(Tcp::LOOPBACK.accept(&tcp_listener)?));
        smc.accept(&listener).and_then(exchange::serve).map_err(CliError::io("SMC"))?;
        let panicked = |_| Err(io::Error::other("a thread panicked"));
        tcp.join().unwrap_or_else(panicked).map_err(CliError::io("TCP"))
    })?;
    stay()
}

fn send(
    device: &PathBuf,
    smc_address: &str,
    tcp_address: &str,
    mut source: Reader,
) -> Result<(), CliError> {
    let (smc, gid) = open(device)?;
    say(Said::Opened { gid })?;
    let start = Instant::now();
    let stream = smc.connect(smc_address).map_err(CliError::io("SMC"))?;
    let micros = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
    let window = matches!(stream.info(), ConnectionInfo::Smcd(info) if info.window);
    say(Said::Connected { window, micros })?;
    let mut smc = Exchange::new(stream).map_err(CliError::io("SMC"))?;
    let tcp = Tcp::LOOPBACK.connect(tcp_address).and_then(Exchange::new);
    let mut tcp = tcp.map_err(CliError::io("TCP"))?;
    smc.ping().map_err(CliError::io("SMC"))?;
    tcp.ping().map_err(CliError::io("TCP"))?;
    let mut hash = Sha256::new();
    let mut block = Vec::with_capacity(BLOCK);
    let mut bytes = 0;
    while source.next(&mut block)? {
        hash.update(&block);
        smc.send(&block).map_err(CliError::io("SMC"))?;
        tcp.send(&block).map_err(CliError::io("TCP"))?;
        bytes += block.len() as u64;
        say(Said::Progress(bytes))?;
    }
    let smc = smc.finish().map_err(CliError::io("SMC"))?;
    let tcp = tcp.finish().map_err(CliError::io("TCP"))?;
    say(Said::Done { bytes, sent: exchange::hex(&hash.finalize()), smc, tcp })?;
    stay()
}

/// Blocks of a [`Source`].
enum Reader {
    File(File, PathBuf),
    Generated { left: u64, state: u64 },
}

impl Source {
    fn open(self) -> Result<Reader, CliError> {
        match self {
            Source::File(path) => {
                let what = format!("cannot open {}", path.display());
                Ok(Reader::File(File::open(&path).map_err(CliError::io(what))?, path))
            }
            Source::Generated(left) => Ok(Reader::Generated { left, state: 0x5eed }),
        }
    }
}

impl Reader {
    /// Puts the next up to [`BLOCK`] bytes into `block`. `false`: there are none.
    fn next(&mut self, block: &mut Vec<u8>) -> Result<bool, CliError> {
        block.clear();
        match self {
            Reader::File(file, path) => {
                let what = format!("cannot read {}", path.display());
                file.take(BLOCK as u64).read_to_end(block).map_err(CliError::io(what))?;
            }
            Reader::Generated { left, state } => {
                let n = (*left).min(BLOCK as u64);
                *left -= n;
                for _ in 0..n.div_ceil(8) {
                    // xorshift64: cheap, and nothing compresses or repeats.
                    *state ^= *state << 13;
                    *state ^= *state >> 7;
                    *state ^= *state << 17;
                    block.extend_from_slice(&state.to_le_bytes());
                }
                block.truncate(n as usize);
            }
        }
        Ok(!block.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_data_has_the_length_asked_for_and_does_not_repeat() {
        let mut reader = Source::Generated(BLOCK as u64 + 5).open().unwrap();
        let mut block = Vec::new();
        assert!(reader.next(&mut block).unwrap());
        assert_eq!(block.len(), BLOCK);
        assert_ne!(block[..8], block[8..16]);
        assert!(reader.next(&mut block).unwrap());
        assert_eq!(block.len(), 5);
        assert!(!reader.next(&mut block).unwrap());
    }
}
