//! Sockets: `SmcListener` and `SmcStream`, how they wait, and what they were told.

mod config;
mod conn;
mod facts;
mod greeting;
mod hub;
mod listener;
mod options;
mod poller;
mod readiness;
mod snapshot;
mod stack;
pub mod statistics;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod wait;
mod watch;

pub use crate::adapter::Fallback;
pub use crate::adapter::facts::{GroupFacts, LinkFacts, RnicFacts, SmcRFacts, gid as show_gid};
pub use crate::adapter::rdma::{NoRdma, Rnics, SmcROptions};
pub use config::{Config, DEFAULT_EID, DataPath, MAX_DEVICES};
pub use facts::{Facts, SmcDFacts};
pub use greeting::Greeting;
pub use listener::SmcListener;
pub use options::KeepAlive;
pub use poller::{Interest, Poller, Readied};
pub use snapshot::{ConnectionFacts, Cursors};
pub use stack::{Stack, Totals};
pub use stream::SmcStream;
pub use watch::{Look, Seen, SignalMask, Watch, Woken};
