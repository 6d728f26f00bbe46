//! Sockets: `SmcListener` and `SmcStream`, how they wait, and what they were told.

mod config;
mod conn;
mod facts;
mod hub;
mod listener;
mod options;
mod poller;
mod readiness;
mod snapshot;
mod stack;
mod stream;
#[cfg(feature = "tokio")]
pub mod tokio;
mod wait;

pub use crate::adapter::Fallback;
pub use crate::adapter::facts::{GroupFacts, LinkFacts, RnicFacts, SmcRFacts, gid as show_gid};
pub use crate::adapter::rdma::{NoRdma, Rnics, SmcROptions};
pub use config::{Config, DEFAULT_EID, DataPath, MAX_DEVICES};
pub use facts::{Facts, SmcDFacts};
pub use listener::SmcListener;
pub use options::KeepAlive;
pub use poller::{Interest, Poller, Readied};
pub use snapshot::ConnectionFacts;
pub use stack::{Stack, Totals};
pub use stream::SmcStream;
