// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of devices failing to open.

use std::error::Error as _;
use std::io;

use virtio_ism::IsmError;
use virtio_ism::transport::DeviceAddress;

/// The error kind of a stack without any device, by the kinds of the devices' errors.
pub(super) fn kind_of_all(kinds: &[io::ErrorKind]) -> io::ErrorKind {
    use io::ErrorKind::{NotFound, Other, PermissionDenied, ResourceBusy};
    let told = [NotFound, PermissionDenied, ResourceBusy];
    let first = kinds.first().filter(|first| told.contains(first));
    first.filter(|first| kinds.iter().all(|kind| kind == *first)).copied().unwrap_or(Other)
}

/// The error kind of PCI functions of use soon. No event tells a driver of a daemon's return, or of the
/// end of a migration.
const TEMPORARY: io::ErrorKind = io::ErrorKind::NotConnected;

/// Whether another attempt to open this device may succeed soon, after an error of this kind.
pub(super) fn is_temporary(address: &DeviceAddress, kind: io::ErrorKind) -> bool {
    match address {
        DeviceAddress::Socket(_) => false,
        DeviceAddress::Pci(_) | DeviceAddress::AnyPci => {
            matches!(kind, TEMPORARY | io::ErrorKind::ResourceBusy)
        }
    }
}

/// The error of a device failing to open, without the address, to be added by callers.
pub(super) fn open_error(address: &DeviceAddress, error: &IsmError) -> io::Error {
    let mut causes = std::iter::successors(error.source(), |cause| (*cause).source());
    let of_system = causes.find_map(|cause| cause.downcast_ref::<io::Error>());
    let kind = match (error.is_in_use(), of_system) {
        (true, _) => io::ErrorKind::ResourceBusy,
        _ if error.is_temporary() => TEMPORARY,
        (false, Some(cause)) => cause.kind(),
        (false, None) => io::ErrorKind::Other,
    };
    let text = error.to_string();
    let shorter = text.strip_prefix(&format!("connecting to {address}: "));
    io::Error::new(kind, shorter.unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;

    use super::kind_of_all;
    use crate::socket::{Config, Stack};

    #[test]
    fn a_missing_socket_is_named_once_and_the_error_keeps_its_kind() {
        let mut config = Config::new("/nonexistent/a.sock");
        config.device_timeout = std::time::Duration::ZERO;
        let error = Stack::open(config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        let text = error.to_string();
        assert!(text.starts_with("/nonexistent/a.sock: No such file"), "{text}");
        assert_eq!(text.matches("/nonexistent").count(), 1, "{text}");
        assert!(!text.contains("RNIC") && !text.contains("libibverbs"), "{text}");
    }

    #[test]
    fn devices_that_fail_in_different_ways_are_an_error_of_no_special_kind() {
        use ErrorKind::{NotFound, Other, PermissionDenied, ResourceBusy, TimedOut};
        for (kinds, expected) in [
            (&[ResourceBusy, ResourceBusy][..], ResourceBusy),
            (&[PermissionDenied], PermissionDenied),
            (&[NotFound, ResourceBusy], Other),
            (&[TimedOut], Other),
            (&[], Other),
        ] {
            assert_eq!(kind_of_all(kinds), expected, "{kinds:?}");
        }
    }
}
