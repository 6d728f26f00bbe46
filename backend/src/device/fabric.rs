//! A fabric: one CHID with its own registry, token table and quotas.

use std::sync::Arc;

use virtio_ism_abi::{Chid, Gid};

use super::{Clock, Device, Doorbell, FabricCaps, FabricInfo, Limits, MonotonicClock};

/// GIDs that live on this host. Fabrics of one daemon share one.
#[derive(Debug, Default)]
pub struct GidPool {}

/// How a fabric is made.
#[derive(Clone)]
pub struct FabricConfig {
    /// Its CHID, 0xFF00 to 0xFFFF.
    pub chid: Chid,
    /// Limits of a device whose port says nothing else.
    pub limits: Limits,
    /// Caps on the sum of the devices' limits.
    pub caps: FabricCaps,
    /// GIDs of the host.
    pub gids: Arc<GidPool>,
    /// The clock of rates and event times.
    pub clock: Arc<dyn Clock>,
}

impl FabricConfig {
    /// A fabric with default limits and caps.
    pub fn new(chid: Chid) -> FabricConfig {
        FabricConfig {
            chid,
            limits: Limits::default(),
            caps: FabricCaps::default(),
            gids: Arc::default(),
            clock: Arc::new(MonotonicClock::default()),
        }
    }
}

/// Why there is no fabric.
#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    /// The CHID is below 0xFF00.
    #[error("CHID {0} is not in the range of emulated devices (ff00 to ffff)")]
    Chid(Chid),
    /// The default limits contradict each other.
    #[error("illegal limit: {0}")]
    Limits(&'static str),
    /// The system gives no random numbers.
    #[error("no random numbers")]
    Random(#[source] std::io::Error),
}

/// Why a device cannot join.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The sum of limits would exceed a cap of the fabric.
    #[error("{what} would exceed the fabric's cap")]
    Cap {
        /// Which sum.
        what: &'static str,
    },
    /// The port's limits contradict each other.
    #[error("illegal limit: {0}")]
    Limits(&'static str),
    /// The pinned GID is alive already, or equals a living one in its second half.
    #[error("GID {0} is in use")]
    GidInUse(Gid),
    /// The pinned GID is one that no driver could live with.
    #[error("GID {0} is not usable")]
    GidIllegal(Gid),
    /// All devices of a loopback fabric share the fabric's GID.
    #[error("a GID cannot be pinned on the loopback fabric")]
    GidOnLoopback,
    /// The system gives no random numbers.
    #[error("no random numbers")]
    Random(#[source] std::io::Error),
}

/// How a front end joins.
#[derive(Clone, Debug, Default)]
pub struct PortConfig {
    /// Name for logs and metrics.
    pub name: String,
    /// Every life has this GID. For tests.
    pub pinned_gid: Option<Gid>,
    /// Limits, if not the fabric's defaults.
    pub limits: Option<Limits>,
    /// Mapping slots of the front end, if not the limits'.
    pub max_maps: Option<u32>,
    /// Move queues, told in the configuration.
    pub num_move_queues: u16,
}

/// One CHID.
#[derive(Debug)]
pub struct Fabric {}

impl Fabric {
    /// A fabric without devices.
    ///
    /// # Errors
    /// See [`FabricError`].
    pub fn new(_config: FabricConfig) -> Result<Arc<Fabric>, FabricError> {
        Ok(Arc::new(Fabric {}))
    }

    /// Adds a device. `bell` is rung when events wait for it. It leaves when the last `Arc` goes.
    ///
    /// # Errors
    /// See [`JoinError`].
    pub fn join(
        self: &Arc<Fabric>,
        _port: PortConfig,
        _bell: Arc<dyn Doorbell>,
    ) -> Result<Arc<Device>, JoinError> {
        Err(JoinError::Limits("not yet"))
    }

    /// The fabric as it is now.
    pub fn snapshot(&self) -> FabricInfo {
        FabricInfo { chid: Chid(0), tokens: 0, slabs: 0, slab_bytes: 0, devices: Vec::new() }
    }
}
