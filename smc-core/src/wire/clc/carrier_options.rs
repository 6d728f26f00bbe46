// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Vendor Unique Experimental Options by which two ends agree on records
//! ([`crate::wire::record`]).
//!
//! ```text
//! Proposal:  52 OUI (3) | 55 version | 56 features (2) | 58 reserved (2)
//! extension: 40 version | 41 reserved | 42 features (2)
//! ```
//!
//! Accept and Confirm do not repeat the OUI (CLCV2-16): the answer is in the words of the vendor
//! whose options were offered.

use super::VendorOffer;
use crate::wire::WireError;

bitflags::bitflags! {
    /// What an end can do beyond leaving a ring.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct CarrierFeatures: u16 {
        /// It comes back to a ring by CLC records.
        const RETURN = 0x0001;
    }
}

/// The options of an end that speaks records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CarrierOptions {
    version: u8,
    features: CarrierFeatures,
}

impl CarrierOptions {
    /// The vendor: an OUI with the locally administered bit (0x02 of the first byte), which nobody
    /// can be assigned.
    pub const OUI: [u8; 3] = *b"VIS";
    /// The version of the records.
    pub const VERSION: u8 = 1;

    /// Options of this version.
    pub const fn new(features: CarrierFeatures) -> CarrierOptions {
        CarrierOptions { version: CarrierOptions::VERSION, features }
    }

    /// The version of the records.
    pub const fn version(&self) -> u8 {
        self.version
    }

    /// The features.
    pub const fn features(&self) -> CarrierFeatures {
        self.features
    }

    /// What both ends can do.
    pub fn common(self, other: CarrierOptions) -> CarrierOptions {
        CarrierOptions {
            version: self.version.min(other.version),
            features: self.features & other.features,
        }
    }

    /// As a client's Proposal offers them.
    pub const fn offer(self) -> VendorOffer {
        let [high, low] = self.features.bits().to_be_bytes();
        VendorOffer { oui: CarrierOptions::OUI, options: [self.version, high, low, 0, 0] }
    }

    /// The options in an offer; `None` if it is another vendor's. Of a later version only what this
    /// one knows is looked at.
    ///
    /// # Errors
    /// [`WireError::CarrierVersion`] for version 0, [`WireError::CarrierReserved`] for reserved bits
    /// of version 1 that are not zero.
    pub fn from_offer(offer: &VendorOffer) -> Result<Option<CarrierOptions>, WireError> {
        let [version, high, low, reserved @ ..] = offer.options();
        if offer.oui() != CarrierOptions::OUI {
            return Ok(None);
        }
        if version == 0 {
            return Err(WireError::CarrierVersion(version));
        }
        let bits = u16::from_be_bytes([high, low]);
        let features = CarrierFeatures::from_bits_truncate(bits);
        if version == CarrierOptions::VERSION && (reserved != [0; 2] || features.bits() != bits) {
            return Err(WireError::CarrierReserved { features: bits, reserved });
        }
        Ok(Some(CarrierOptions { version, features }))
    }

    /// As Accept and Confirm state them.
    pub const fn answer(self) -> [u8; 4] {
        let [high, low] = self.features.bits().to_be_bytes();
        [self.version, 0, high, low]
    }

    /// The options that a server has taken from those that were `offered`; `None` if it takes none.
    ///
    /// # Errors
    /// [`WireError::CarrierVersion`] for a version that was not offered or is 0,
    /// [`WireError::CarrierReserved`] for a reserved byte that is not zero,
    /// [`WireError::CarrierFeatures`] for features that were not offered.
    pub fn from_answer(
        offered: CarrierOptions,
        answer: [u8; 4],
    ) -> Result<Option<CarrierOptions>, WireError> {
        let [version, reserved, high, low] = answer;
        if answer == [0; 4] {
            return Ok(None);
        }
        if !(1..=offered.version).contains(&version) {
            return Err(WireError::CarrierVersion(version));
        }
        let bits = u16::from_be_bytes([high, low]);
        if reserved != 0 {
            return Err(WireError::CarrierReserved { features: bits, reserved: [0, reserved] });
        }
        if bits & !offered.features.bits() != 0 {
            let offered = offered.features.bits();
            return Err(WireError::CarrierFeatures { got: bits, offered });
        }
        Ok(Some(CarrierOptions { version, features: CarrierFeatures::from_bits_truncate(bits) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RETURNS: CarrierOptions = CarrierOptions::new(CarrierFeatures::RETURN);
    const STAYS: CarrierOptions = CarrierOptions::new(CarrierFeatures::empty());

    fn offered(options: [u8; 5]) -> Result<Option<CarrierOptions>, WireError> {
        CarrierOptions::from_offer(&VendorOffer::new(CarrierOptions::OUI, options).unwrap())
    }

    // Shows: CLCV2-14, CLCV2-16.
    #[test]
    fn options_are_written_and_read_byte_for_byte() {
        assert_eq!(RETURNS.offer().oui(), [0x56, 0x49, 0x53]);
        assert_eq!(RETURNS.offer().options(), [1, 0, 1, 0, 0]);
        assert_eq!((RETURNS.answer(), STAYS.answer()), ([1, 0, 0, 1], [1, 0, 0, 0]));
        for options in [RETURNS, STAYS] {
            assert_eq!(CarrierOptions::from_offer(&options.offer()), Ok(Some(options)));
            assert_eq!(CarrierOptions::from_answer(RETURNS, options.answer()), Ok(Some(options)));
        }
        assert_eq!(RETURNS.common(STAYS), STAYS);
    }

    #[test]
    fn the_vendor_is_locally_administered_and_no_group() {
        assert_eq!(CarrierOptions::OUI[0] & 0b11, 0b10);
    }

    // Shows: CLCV2-15.
    #[test]
    fn other_vendors_and_no_answer_are_no_options() {
        let other = VendorOffer::new([1, 2, 3], [0; 5]).unwrap();
        assert_eq!(CarrierOptions::from_offer(&other), Ok(None));
        assert_eq!(CarrierOptions::from_answer(RETURNS, [0; 4]), Ok(None));
    }

    #[test]
    fn each_way_of_being_wrong_has_its_error() {
        assert_eq!(offered([0, 0, 1, 0, 0]), Err(WireError::CarrierVersion(0)));
        let reserved = |features, reserved| WireError::CarrierReserved { features, reserved };
        assert_eq!(offered([1, 0, 1, 0, 4]), Err(reserved(1, [0, 4])));
        assert_eq!(offered([1, 0x80, 1, 0, 0]), Err(reserved(0x8001, [0, 0])));
        let answered = |answer| CarrierOptions::from_answer(STAYS, answer);
        assert_eq!(answered([2, 0, 0, 0]), Err(WireError::CarrierVersion(2)));
        assert_eq!(answered([0, 0, 0, 1]), Err(WireError::CarrierVersion(0)));
        assert_eq!(answered([1, 7, 0, 0]), Err(reserved(0, [0, 7])));
        let features = WireError::CarrierFeatures { got: 1, offered: 0 };
        assert_eq!(answered([1, 0, 0, 1]), Err(features));
    }

    #[test]
    fn a_later_version_is_met_at_this_one() {
        let later = offered([3, 0xff, 0xff, 9, 9]).unwrap().unwrap();
        assert_eq!(later.common(RETURNS), RETURNS);
    }
}
