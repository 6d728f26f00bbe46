// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc listen --echo`: a thread per client sends received bytes back. `smc connect --echo`.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use guest_driver::{ConnectionInfo, SmcStream};

use crate::error::CliError;
use crate::output;

/// Most clients at a time; more are closed at once.
const CLIENTS: usize = 256;
/// Bytes to send back at a time.
const CHUNK: usize = 64 << 10;

/// Number of clients being served.
static SERVED: AtomicUsize = AtomicUsize::new(0);

/// Serves a client in a thread of its own. A connection on TCP is closed unless `tcp_ok`.
pub(super) fn start(stream: SmcStream, peer: String, tcp_ok: bool, verbose: bool) {
    let info = stream.info();
    if verbose {
        output::note(&format!("{peer}: {info}"));
    }
    if matches!(info, ConnectionInfo::Tcp(_)) && !tcp_ok {
        return;
    }
    if SERVED.fetch_add(1, Ordering::Relaxed) >= CLIENTS {
        SERVED.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    std::thread::spawn(move || {
        let result = send_back(&stream);
        SERVED.fetch_sub(1, Ordering::Relaxed);
        if let Err(error) = result.as_ref().map(drop)
            && verbose
        {
            output::note(&format!("{peer}: {error}"));
        }
    });
}

/// Sends a server's bytes back, until the server's end.
///
/// # Errors
/// The connection stays on TCP, and `tcp_ok` is not set; or the connection failed.
pub(super) fn once(
    stream: &SmcStream,
    peer: &str,
    tcp_ok: bool,
    verbose: bool,
) -> Result<(), CliError> {
    let info = stream.info();
    if verbose {
        output::note(&format!("{peer}: {info}"));
    }
    if let ConnectionInfo::Tcp(why) = &info
        && !tcp_ok
    {
        return Err(CliError::NotSmc { why: why.to_string() });
    }
    let failed = |source| CliError::Transfer { peer: peer.into(), source };
    stream.set_linger(Some(super::LINGER)).map_err(failed)?;
    send_back(stream).map_err(failed)
}

fn send_back(stream: &SmcStream) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        let n = stream.recv(&mut buffer)?;
        if n == 0 {
            stream.shutdown(std::net::Shutdown::Write)?;
            return stream.linger(super::LINGER);
        }
        let mut rest = buffer.get(..n).unwrap_or_default();
        while !rest.is_empty() {
            let sent = stream.send(rest)?;
            rest = rest.get(sent..).unwrap_or_default();
        }
    }
}
