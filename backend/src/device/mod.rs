//! The ISM device without virtio: bytes of commands in, bytes of replies and events out.

mod fabric;
mod info;
mod limits;
mod map;
mod port;

pub use fabric::{Fabric, FabricConfig, FabricError, GidPool, JoinError, PortConfig};
pub use info::{DeviceInfo, FabricInfo};
pub use limits::{Clock, FabricCaps, Limits, MonotonicClock};
pub use map::{MapJob, MapRequest, Outcome, Reply, StaleMap, UnmapJob};
pub use port::{Departure, Device, Doorbell, Moved, Wake};
