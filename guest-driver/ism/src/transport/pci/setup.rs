// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! From an address to a running device (virtio 1.3, 3.1.1).

use std::sync::Arc;
use std::time::Instant;

use virtio_ism_abi::FIRST_MOVE_QUEUE;
use virtio_ism_abi::config::{Config, Features};
use virtio_ism_abi::virtio_pci::{VERSION_1, status};

use super::caps::{Layout, read_layout};
use super::common::{Common, Io, notify_offset};
use super::connection::{NotifyRegister, Pci};
use super::function::Function;
use super::monitor::{PciDevice, PciMonitor};
use super::release::MemoryRelease;
use super::window::BarWindow;
use super::{Interrupts, NoPciDevice, PciAddress, PciError, discover, error};
use crate::transport::{RunningDevice, SetupOptions};
use crate::virtqueue::{GuestPool, Health, Queues, Wiring};
use ism_sys::{DmaMemory, EventFd, Registers};

/// VIRTIO_F_EVENT_IDX: event indices decide about notifications.
const EVENT_IDX: u64 = 1 << 29;

/// Least memory, bytes: for control and event queue and a few buffers.
const LEAST_MEMORY: usize = 4 << 20;
/// Further memory for each move queue, bytes.
const MEMORY_PER_MOVE_QUEUE: usize = 4 << 20;

/// Opens the function at an address and sets up features, memory, queues and window.
///
/// `move_queues` is the number of move queues wanted, `guest_memory` the size of the memory for the device in
/// bytes; with too few free huge pages the memory is smaller. Returns the device and its kind of interrupts.
///
/// # Errors
/// There is no such device, no driver gives the device to user space, another process uses the device, or the
/// device lacks a needed feature.
pub fn open(
    address: PciAddress,
    wanted: SetupOptions,
) -> Result<(Arc<RunningDevice>, Interrupts), PciError> {
    let begin = Instant::now();
    let function = Function::open(address)?;
    let interrupts = function.interrupts();
    function.enable()?;
    let space = function.config_space()?;
    let layout = read_layout(&space, |bar| function.bar_size(bar))?;
    let release = MemoryRelease::new(wanted.leaves);
    let (device, notify, registers) = map(function, &layout, Arc::clone(&release))?;

    let negotiated =
        negotiate(&device.common, &registers, layout.window.is_some(), wanted.refused())?;
    let Negotiated { config, mut features, event_idx } = negotiated;
    let mut device = device;
    device.window = features
        .contains(Features::WINDOW)
        .then(|| map_window(&device.function, &layout, &config))
        .flatten()
        .map(Arc::new);
    if device.window.is_none() {
        features.remove(Features::WINDOW);
    }

    let move_queues = wanted
        .move_queues
        .max(1)
        .min(config.num_move_queues.get())
        .min(device.common.num_queues().saturating_sub(FIRST_MOVE_QUEUE));
    if move_queues == 0 {
        return Err(PciError::Missing("a move queue"));
    }
    let (pool, huge) = memory(move_queues, wanted.guest_memory)?;
    device.pool = Some(Arc::clone(&pool));
    let health = Health::new();
    let n = FIRST_MOVE_QUEUE + move_queues;
    let calls = (0..n).map(|_| EventFd::new().map(Arc::new)).collect::<Result<Vec<_>, _>>();
    let calls = calls.map_err(|source| system("eventfd", source))?;
    let wirings = (0..n)
        .zip(&calls)
        .map(|(queue, call)| {
            health.wake_with(call);
            let off = device.common.notify_off(queue);
            let at = notify_offset(queue, off, layout.notify_multiplier, layout.notify)?;
            Ok(Wiring {
                kick: Box::new(NotifyRegister { registers: notify.clone(), at, queue }),
                call: Arc::clone(call),
                health: Arc::clone(&health),
                event_idx,
            })
        })
        .collect::<Result<Vec<_>, PciError>>()?;
    let mut wirings = wirings.into_iter();
    let (Some(control), Some(events)) = (wirings.next(), wirings.next()) else {
        return Err(PciError::Missing("a queue"));
    };
    let max_move = config.max_move.get() as usize;
    let queues = Queues::new(&pool, max_move, control, events, wirings)?;

    let monitor = start(&device, interrupts, &queues, &calls, &health)?;
    let window = device.window.clone();
    let monitor = monitor.start(device).map_err(|source| system("thread", source))?;
    queues.events.start()?;
    tracing::info!(
        %address,
        %interrupts,
        took = ?begin.elapsed(),
        move_queues,
        window = window.as_ref().map_or(0, |window| window.size()),
        memory = pool.size(),
        pages = if huge { "huge" } else { "locked; reserve huge pages to be safe" },
        "PCI device is set up"
    );
    let health_of = Arc::clone(&health);
    let function = Box::new(Pci { health: health_of, window, release, monitor: Some(monitor) });
    let device = RunningDevice::new(config, features, queues, pool, health, function);
    Ok((Arc::new(device), interrupts))
}

/// Opens the first virtio-ism function not in use by another process.
///
/// # Errors
/// There is none. The text lists the devices and the reason for each.
pub fn open_any(wanted: SetupOptions) -> Result<Arc<RunningDevice>, NoPciDevice> {
    let found = discover::functions().map_err(NoPciDevice::List)?;
    let mut failures = Vec::new();
    for function in found {
        match open(function.address, wanted) {
            Ok((device, _)) => return Ok(device),
            Err(error) => failures.push((function.address, error)),
        }
    }
    let is_temporary = failures.iter().any(|(_, error)| error.is_temporary());
    Err(NoPciDevice::Unusable { why: error::tried(&failures), is_temporary })
}

fn system(what: &str, source: std::io::Error) -> PciError {
    PciError::System { what: what.into(), source }
}

/// Maps the device's structures. Returns notification registers and configuration separately.
fn map(
    function: Function,
    layout: &Layout,
    release: Arc<MemoryRelease>,
) -> Result<(PciDevice, Registers, Registers), PciError> {
    let (common_map, common) = function.registers(layout.common)?;
    let (notify_map, notify) = function.registers(layout.notify)?;
    let (isr_map, isr) = function.registers(layout.isr)?;
    let (config_map, config) = function.registers(layout.device)?;
    let maps = vec![common_map, notify_map, isr_map, config_map];
    let device = PciDevice {
        function,
        common: Common(common),
        isr,
        maps,
        window: None,
        pool: None,
        release,
    };
    Ok((device, notify, config))
}

struct Negotiated {
    config: Config,
    features: Features,
    event_idx: bool,
}

/// Resets the device, agrees on features and reads the configuration.
fn negotiate<I: Io>(
    common: &Common<I>,
    config: &impl Io,
    has_window: bool,
    refused: Features,
) -> Result<Negotiated, PciError> {
    if common.status() == status::NO_DEVICE {
        return Err(PciError::Absent);
    }
    common.reset()?;
    common.advance(status::ACKNOWLEDGE);
    common.advance(status::DRIVER);
    let offered = common.offered();
    if offered & VERSION_1 == 0 {
        return Err(PciError::Features { features: VERSION_1 });
    }
    // The device and its other users run on another kernel, which cannot wake a thread here. The lines of
    // slabs are for processes with many peers, on one kernel.
    let mut refused = refused | Features::PEER_FUTEX | Features::DOORBELL | Features::SLAB_LINE;
    if !has_window {
        refused |= Features::WINDOW;
    }
    let known = Features::from_bits_truncate(offered);
    common.accept((known - refused).bits() | VERSION_1 | (offered & EVENT_IDX))?;
    let config = common.read_config(config)?;
    let features = Features::usable(offered, &config) - refused;
    Ok(Negotiated { config, features, event_idx: offered & EVENT_IDX != 0 })
}

/// Maps a window of the configured size. Without a window, the device works by moves.
fn map_window(function: &Function, layout: &Layout, config: &Config) -> Option<BarWindow> {
    let place = layout.window?;
    let window_size = config.window_size.get();
    if place.len != window_size {
        // The size is 0 if the front end cannot map.
        tracing::info!(region = place.len, window_size, "no window: moves only");
        return None;
    }
    match BarWindow::map(function, place) {
        Ok(window) => Some(window),
        Err(error) => {
            tracing::warn!(%error, "the window cannot be mapped: moves only");
            None
        }
    }
}

fn memory(move_queues: u16, wanted: u64) -> Result<(Arc<GuestPool>, bool), PciError> {
    let least = LEAST_MEMORY + usize::from(move_queues) * MEMORY_PER_MOVE_QUEUE;
    let wanted = usize::try_from(wanted).unwrap_or(usize::MAX).clamp(least, 1 << 36);
    let memory = DmaMemory::allocate(wanted, least)?;
    let huge = memory.is_huge();
    Ok((GuestPool::pinned(memory), huge))
}

/// Wires interrupts, starts the queues and the device.
fn start(
    device: &PciDevice,
    interrupts: Interrupts,
    queues: &Queues,
    calls: &[Arc<EventFd>],
    health: &Arc<Health>,
) -> Result<PciMonitor, PciError> {
    let (monitor, vectors) = PciMonitor::wire(&device.function, interrupts, calls, health)?;
    let config_vector = matches!(interrupts, Interrupts::MsiX { .. }).then_some(0);
    device.common.set_config_vector(config_vector)?;
    for (queue, (ring, vector)) in queues.addresses().iter().zip(vectors).enumerate() {
        device.common.start_queue(queue as u16, ring, vector)?;
    }
    if config_vector.is_none() {
        device
            .function
            .unmask_intx()
            .map_err(|source| PciError::System { what: "unmasking INTx".into(), source })?;
    }
    device.common.advance(status::DRIVER_OK);
    if device.common.status() & status::NEEDS_RESET != 0 {
        return Err(PciError::NeedsReset);
    }
    Ok(monitor)
}

#[cfg(test)]
#[path = "setup_tests.rs"]
mod tests;
