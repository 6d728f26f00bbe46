//! virtio-ism driver and SMC sockets for user space.
//!
//! From the ground up: [`sys`] is what the driver asks of the operating system and has its only
//! `unsafe`, [`transport`] are the ways to reach a device, [`ism`] is the driver: control
//! commands, events, own and peer DMBs. Beside them, [`verbs`] is what RDMA asks of the operating
//! system, `unsafe` included.
pub mod ism;
pub mod rendezvous;
pub mod sys;
pub mod transport;
pub mod verbs;
pub mod virtqueue;

mod adapter;
pub mod socket;

pub use socket::{
    Config, ConnectionFacts, DataPath, Facts, Fallback, Greeting, Interest, KeepAlive, Look,
    Poller, Readied, Rnics, Seen, SignalMask, SmcDFacts, SmcListener, SmcRFacts, SmcROptions,
    SmcStream, Stack, Totals, Watch, Woken, statistics,
};
pub use transport::{DeviceAddress, PciAddress};
