// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The thread of a PCI device: handles interrupts of no queue, and closes the device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use virtio_ism_abi::virtio_pci::status;

use super::common::Common;
use super::function::Function;
use super::release::MemoryRelease;
use super::window::BarWindow;
use super::{Interrupts, PciError};
use crate::virtqueue::{GuestPool, Health};
use ism_sys::{EventFd, PollInterest, Registers, SharedMem, wait};

/// Interval of reads of the device's status without an interrupt, to find a device removed without notice.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Bit of the interrupt status: a queue.
const ISR_QUEUE: u8 = 1;
/// Number of the event queue.
const EVENTS: usize = 1;

/// An open function and its mappings. Dropping it resets the device and closes the function.
pub(super) struct PciDevice {
    pub(super) function: Function,
    pub(super) common: Common<Registers>,
    pub(super) isr: Registers,
    pub(super) maps: Vec<Arc<SharedMem>>,
    pub(super) window: Option<Arc<BarWindow>>,
    pub(super) pool: Option<Arc<GuestPool>>,
    pub(super) release: Arc<MemoryRelease>,
}

impl Drop for PciDevice {
    fn drop(&mut self) {
        self.release.end();
        // First of all, the device must stop using memory of this process.
        if let Err(error) = self.common.reset() {
            tracing::warn!(%error, "the device was not reset");
        }
        self.function.disable();
        self.function.clear_interrupts();
        if let Some(window) = &self.window {
            window.revoke();
        }
        // Open connections must not keep huge pages needed by the next session.
        if let Some(Err(error)) = self.pool.as_ref().map(|pool| pool.revoke()) {
            tracing::warn!(%error, "memory of the device stays in use");
        }
        for mem in &self.maps {
            if let Err(error) = mem.revoke() {
                tracing::error!(%error, "registers cannot be unmapped");
            }
        }
    }
}

/// The vector of each queue, and the number of vectors in use. Vector 0 is for configuration
/// changes, and for queues that get no vector of their own. The event queue gets the first vector,
/// since sleeping threads wait for it.
pub(super) fn plan(vectors: u16, queues: usize) -> (Vec<u16>, u16) {
    let mut order: Vec<usize> = (0..queues).collect();
    if queues > EVENTS {
        order.swap(0, EVENTS);
    }
    let mut plan = vec![0; queues];
    let mut used = 1;
    for queue in order {
        if used < vectors
            && let Some(vector) = plan.get_mut(queue)
        {
            *vector = used;
            used += 1;
        }
    }
    (plan, used)
}

/// The descriptors of the thread's wait.
pub(super) struct PciMonitor {
    /// The device has failed, or the driver closes it.
    pub(super) stop: Arc<EventFd>,
    /// Eventfd of vector 0.
    pub(super) config: Arc<EventFd>,
    /// The kernel wants to remove the function.
    pub(super) request: Arc<EventFd>,
    /// Queues without a vector of their own.
    pub(super) shared: Vec<Arc<EventFd>>,
    pub(super) health: Arc<Health>,
}

impl PciMonitor {
    /// Connects the interrupts of a device to the eventfds of its queues. Returns the vector of
    /// each queue (`None`: INTx).
    pub(super) fn wire(
        function: &Function,
        interrupts: Interrupts,
        calls: &[Arc<EventFd>],
        health: &Arc<Health>,
    ) -> Result<(PciMonitor, Vec<Option<u16>>), PciError> {
        let event = || {
            let event = EventFd::new();
            event
                .map(Arc::new)
                .map_err(|source| PciError::System { what: "eventfd".into(), source })
        };
        let (stop, config, request) = (event()?, event()?, event()?);
        health.wake_with(&stop);
        function.set_request(request.as_fd())?;
        let mut monitor =
            PciMonitor { stop, config, request, shared: Vec::new(), health: health.clone() };
        let Interrupts::MsiX { vectors } = interrupts else {
            monitor.shared = calls.to_vec();
            return Ok((monitor, vec![None; calls.len()]));
        };
        if vectors == 0 {
            return Err(PciError::NoInterrupts);
        }
        let (plan, used) = plan(vectors, calls.len());
        let mut events = vec![monitor.config.clone(); usize::from(used)];
        for (call, vector) in calls.iter().zip(&plan) {
            match events.get_mut(usize::from(*vector)) {
                Some(event) if *vector != 0 => *event = call.clone(),
                _ => monitor.shared.push(call.clone()),
            }
        }
        let events: Vec<BorrowedFd<'_>> = events.iter().map(|event| event.as_fd()).collect();
        function.set_vectors(&events)?;
        Ok((monitor, plan.into_iter().map(Some).collect()))
    }

    /// Starts the thread, which owns the device from now on.
    pub(super) fn start(self, device: PciDevice) -> io::Result<JoinHandle<()>> {
        ism_sys::start_thread("ism-pci", ism_sys::USUAL_STACK, move || self.run(device))
    }

    fn run(&self, device: PciDevice) {
        while !self.health.is_gone() {
            if let Err(why) = self.wait_once(&device) {
                self.health.fail(&why);
            }
        }
        // A function off its bus has no bytes to keep: loads from its window return no stored bytes.
        if device.common.status() != status::NO_DEVICE || device.release.has_window() {
            device.release.wait();
        }
        drop(device);
    }

    /// Waits once and handles the received events. The error is the reason to close the device.
    fn wait_once(&self, device: &PciDevice) -> Result<(), String> {
        let intx = device.function.intx();
        let interrupt = intx.unwrap_or(self.config.as_fd());
        let waited_for = [
            (self.stop.as_fd(), PollInterest::Read),
            (self.request.as_fd(), PollInterest::Read),
            (interrupt, PollInterest::Read),
        ];
        let [_, request, interrupt] =
            wait(waited_for, Some(STATUS_INTERVAL)).map_err(|error| format!("poll: {error}"))?;
        if request.readable {
            return Err("the device is being removed".into());
        }
        if interrupt.readable || interrupt.hang_up {
            if intx.is_some() {
                self.take_intx(device)?;
            } else {
                self.config.clear();
                self.wake_shared();
            }
        }
        check_status(device.common.status())
    }

    fn take_intx(&self, device: &PciDevice) -> Result<(), String> {
        let gone = |error| format!("the interrupt line is gone: {error}");
        device.function.take_intx().map_err(gone)?;
        // Reading the register lowers the line.
        let causes = device.isr.read_u8(0).unwrap_or(0);
        if causes & ISR_QUEUE != 0 {
            self.wake_shared();
        }
        device.function.unmask_intx().map_err(gone)
    }

    fn wake_shared(&self) {
        for call in &self.shared {
            call.signal();
        }
    }
}

/// Checks that the status is that of a running device.
fn check_status(status: u8) -> Result<(), String> {
    match status {
        status::NO_DEVICE => Err("the device is not on its bus any more".into()),
        bits if bits & status::NEEDS_RESET != 0 => Err("the device asks for a reset".into()),
        bits if bits & status::DRIVER_OK == 0 => Err("the device was reset".into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_queue_has_a_vector_of_its_own_if_there_are_enough() {
        assert_eq!(plan(5, 4), (vec![2, 1, 3, 4], 5));
        assert_eq!(plan(9, 3), (vec![2, 1, 3], 4));
    }

    #[test]
    fn with_few_vectors_the_event_queue_keeps_its_own_and_others_share_the_first() {
        assert_eq!(plan(1, 3), (vec![0, 0, 0], 1));
        assert_eq!(plan(2, 3), (vec![0, 1, 0], 2));
        assert_eq!(plan(3, 4), (vec![2, 1, 0, 0], 3));
    }

    #[test]
    fn only_a_status_of_a_running_device_is_accepted() {
        use status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FEATURES_OK, NEEDS_RESET, NO_DEVICE};
        let running = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
        assert!(check_status(running).is_ok());
        for (status, why) in [
            (NO_DEVICE, "not on its bus"),
            (running | NEEDS_RESET, "asks for a reset"),
            (0, "was reset"),
        ] {
            assert!(check_status(status).unwrap_err().contains(why), "{status:#x}");
        }
    }
}
