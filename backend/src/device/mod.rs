//! The ISM device without virtio: bytes of commands and moves in, bytes of replies and events out.

mod attach;
mod claimed;
mod command;
mod counters;
mod dmb;
mod fabric;
mod gid;
mod info;
mod life;
mod limits;
mod lines;
mod mailbox;
mod map;
mod port;
mod rate;
mod register;
mod session;
mod slab;
mod sync;
mod transfer;
mod window;

pub use fabric::{Fabric, FabricConfig, FabricError, JoinError, PortConfig};
pub use gid::GidPool;
pub use info::{DeviceInfo, FabricInfo};
pub use limits::{Clock, FabricCaps, Limits, MonotonicClock};
pub use map::{MapJob, MapRequest, Outcome, Reply, StaleMap, UnmapJob};
pub use port::{Departure, Device, Doorbell};
pub use transfer::{Moved, SliceReader, Wake};
