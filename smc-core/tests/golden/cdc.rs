// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! CDC: the SMC-R message and the SMC-D control block.

use smc_core::wire::cdc::{
    Cdc, ConsumerWord, ControlBlock, ProducerFlags, ProducerWord, StateFlags,
};
use smc_core::wire::{Cursor, WireError};

use super::{array, bytes};

// Shows: CDC-1.
#[test]
fn first_message_after_30000_bytes() {
    let expected = Cdc {
        sequence: 1,
        token: 1,
        producer: Cursor::new(0, 30000),
        consumer: Cursor::new(0, 0),
        producer_flags: ProducerFlags::empty(),
        state_flags: StateFlags::empty(),
    };
    let wire = bytes("fe2c0001 00000001 0000 0000 00007530 0000 0000 00000000 00 00 00*18");
    assert_eq!(Cdc::parse(&wire), Ok(expected));
    assert_eq!(expected.emit().as_slice(), wire);
}

#[test]
fn producer_cursor_after_a_wrap() {
    let wire = bytes("fe2c0002 00000001 00000001 00005f90 0000 0000 00000000 00 00 00*18");
    assert_eq!(Cdc::parse(&wire).unwrap().producer, Cursor::new(1, 24464));
}

#[test]
fn flags_have_the_bits_linux_uses() {
    let with = |producer: u8, state: u8| {
        let mut wire = Cdc::default().emit();
        wire[24] = producer;
        wire[25] = state;
        let cdc = Cdc::parse(&wire).unwrap();
        (cdc.producer_flags, cdc.state_flags)
    };
    assert_eq!(with(0x80, 0), (ProducerFlags::BLOCKED, StateFlags::empty()));
    assert_eq!(with(0, 0x80).1, StateFlags::SENDING_DONE);
    assert_eq!(with(0, 0x40).1, StateFlags::CLOSED);
    assert_eq!(with(0, 0xc0).1, StateFlags::CLOSED | StateFlags::SENDING_DONE);
    assert_eq!(with(0, 0x20).1, StateFlags::ABORT);
    assert_eq!(with(0x07, 0x1f), (ProducerFlags::empty(), StateFlags::empty()));
}

// Shows: CDC-1.
#[test]
fn cdc_of_another_type_or_length_is_refused() {
    let wire = Cdc::default().emit();
    for n in 0..44 {
        let error = WireError::Truncated { field: "CDC", at: 0, need: 44, have: n };
        assert_eq!(Cdc::parse(&wire[..n]), Err(error));
    }
    let mut longer = wire.to_vec();
    longer.push(0);
    assert_eq!(Cdc::parse(&longer), Err(WireError::TrailingBytes { length: 44, extra: 1 }));
    let mut other = wire;
    other[0] = 0x07;
    assert_eq!(Cdc::parse(&other), Err(WireError::BadCdcType(7)));
    let mut other = wire;
    other[1] = 45;
    let error = WireError::LengthMismatch { message: "CDC", got: 45, expected: 44 };
    assert_eq!(Cdc::parse(&other), Err(error));
}

/// The integers are in host order; the capture is of a little-endian machine.
#[cfg(target_endian = "little")]
#[test]
fn control_block_in_memory() {
    let expected = ControlBlock {
        producer: ProducerWord { cursor: Cursor::new(0, 30000) },
        consumer: ConsumerWord {
            cursor: Cursor::new(0, 60000),
            producer_flags: ProducerFlags::empty(),
            state_flags: StateFlags::SENDING_DONE,
        },
    };
    let memory: [u8; 32] =
        array("fe 00*7 | 00 00 30 75 00 00 00 00 | 00 00 60 ea 00 00 00 80 | 00*8");
    assert_eq!(ControlBlock::from_bytes(&memory), expected);
    assert_eq!(expected.to_bytes(), memory);
}

#[test]
fn words_come_back_from_their_64_bits() {
    let cursor = Cursor::new(0x1234, 0x89ab_cdef);
    let producer = ProducerWord { cursor };
    assert_eq!(ProducerWord::from_u64(producer.to_u64()), producer);
    let consumer = ConsumerWord {
        cursor,
        producer_flags: ProducerFlags::BLOCKED | ProducerFlags::URGENT_PENDING,
        state_flags: StateFlags::CLOSED,
    };
    assert_eq!(ConsumerWord::from_u64(consumer.to_u64()), consumer);
    let bytes = consumer.to_u64().to_ne_bytes();
    assert_eq!(u16::from_ne_bytes([bytes[0], bytes[1]]), 0x1234);
    assert_eq!((bytes[6], bytes[7]), (0xc0, 0x40));
}

#[test]
fn fresh_memory_is_a_control_block_that_says_nothing() {
    assert_eq!(ControlBlock::from_bytes(&[0; 32]), ControlBlock::default());
}
