//! Sockets: `SmcListener` and `SmcStream`, how they wait, and what they were told.

mod config;
mod greeting;
mod listener;
mod options;
mod poller;
mod stack;
pub mod statistics;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod watch;

pub use crate::info::{
    ConnectionFacts, Cursors, Facts, Fallback, GroupFacts, LinkFacts, RnicFacts, SmcDFacts,
    SmcRFacts, show_gid,
};
pub use crate::smcr::{NoRdma, Rnics, SmcROptions};
pub use config::{Config, DEFAULT_EID, DataPath, MAX_DEVICES};
pub use greeting::Greeting;
pub use listener::SmcListener;
pub use options::KeepAlive;
pub use poller::{Interest, Poller, Readied};
pub use stack::{Stack, Totals};
pub use stream::SmcStream;
pub use watch::{Look, Seen, SignalMask, Watch, Woken};
