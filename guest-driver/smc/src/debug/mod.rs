// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `smc debug`: one archive with the information needed to give support.

mod gather;
mod mask;

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;

use crate::error::CliError;
use crate::output;
use mask::Mask;

/// Help of `smc debug`.
pub(crate) const LONG_ABOUT: &str = "\
Writes an archive (tar) of text files for a bug report: versions, the settings in force, the output of
\"smc doctor\", \"smc stat\" and \"smc devices\", the configuration and the last lines of the log of the
daemon, and facts of the kernel and this machine.

It has names of programs, addresses and ports of connections, and paths. It has no byte of a connection
and no environment of a program. Look at it before you pass it on: \"tar -xOf FILE | less\". With
--mask-addresses each IP address is a number instead, the same one wherever it occurs. What this user
may not read is missing, and the archive says so: root sees most.";

/// End of the help of `smc debug`.
pub(crate) const AFTER: &str = "\
Examples:
  smc debug
  smc debug --mask-addresses --output - | gzip > smc-debug.tar.gz";

/// Options of `smc debug`.
#[derive(Args, Debug)]
pub(crate) struct DebugArgs {
    /// The file, which must not exist; \"-\" is standard output [default: smc-debug-SECONDS.tar].
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Replace IP addresses by numbers.
    #[arg(long)]
    mask_addresses: bool,
}

/// Writes the archive.
///
/// # Errors
/// The file exists, or cannot be written.
pub(crate) fn run(args: &DebugArgs) -> Result<(), CliError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let name = format!("smc-debug-{now}");
    let path = args.output.clone().unwrap_or_else(|| format!("{name}.tar").into());
    let mut mask = args.mask_addresses.then(Mask::default);
    let mut text = |text: String| match &mut mask {
        Some(mask) => mask.applied(&text),
        None => text,
    };
    if path.as_os_str() == "-" {
        let mut out = io::stdout().lock();
        return write(&mut out, (&name, now), &mut text).map_err(CliError::Output);
    }
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(CliError::io(format!("cannot make {}", path.display())))?;
    let written = write(&mut file, (&name, now), &mut text);
    if written.is_err() {
        // Half an archive is useless.
        let _ = std::fs::remove_file(&path);
    }
    written.map_err(CliError::io(format!("cannot write {}", path.display())))?;
    output::print(&format!("{}\n", path.display()))
}

fn write(
    out: impl Write,
    (directory, now): (&str, u64),
    text: &mut impl FnMut(String) -> String,
) -> io::Result<()> {
    let mut archive = tar::Builder::new(out);
    // Run the commands in parallel: each may wait for unresponsive processes.
    std::thread::scope(|scope| {
        let begin = |file: &'static gather::ReportFile| (file.name, scope.spawn(|| file.gather()));
        let begun: Vec<_> = gather::FILES.iter().map(begin).collect();
        begun.into_iter().try_for_each(|(name, thread)| {
            let found = thread.join().map_or_else(|_| String::new(), gather::Output::text);
            let found = text(found);
            let mut header = tar::Header::new_ustar();
            header.set_mode(0o600);
            header.set_mtime(now);
            header.set_size(found.len() as u64);
            archive.append_data(&mut header, format!("{directory}/{name}"), found.as_bytes())
        })
    })?;
    archive.into_inner()?.flush()
}
