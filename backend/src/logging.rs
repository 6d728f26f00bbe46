//! Logs: `tracing` for this crate, with what the framework says through `log`.
//!
//! What a guest or front end causes is logged at a limited rate per port (see
//! [`Fault`](crate::vhost::Fault)) and never shows bytes of a guest. The framework
//! logs broken descriptors and wrong messages without a limit, so it is off unless RUST_LOG asks for
//! it.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Sets up logging to standard error. RUST_LOG wins over `level`.
pub(crate) fn init(level: Option<tracing::Level>) {
    let level = level.unwrap_or(tracing::Level::INFO);
    // Not "vhost": a name here is a prefix, and would be this crate's too.
    let default = format!("{level},virtio_queue=off,vhost::=error,vhost_user_backend=off");
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(default));
    // Fails if there is a subscriber already, which is then the one to use.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        // Of a line that cannot be written: it would be reported to the same place, by a panic.
        .log_internal_errors(false)
        .try_init();
}
